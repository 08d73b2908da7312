"""One micro-batch of the validation set: our answers next to those of Hugging Face's model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config.sections import RunConfig
from data.loaded import Loaded
from data.pipeline import Pipeline
from data.samples import Prompts
from data.tokens import Tokenizer
from huggingface.torch_model import generate, model_of, need_torch
from machine.memory import check_least
from modelling.generation import Greedy
from modelling.spec import family_of
from modelling.weights.merging import merged
from run.start import Start, load_weights
from sessions.generating import Inference
from sessions.running import compiled


@dataclass(frozen=True)
class Written:
    """What one side generated: the tokens without padding, and their text."""

    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Pair:
    """Both answers to one prompt, and the right one."""

    prompt: str
    expected: str
    ours: Written
    theirs: Written

    @property
    def agrees(self) -> bool:
        """Whether both sides generated the same tokens."""
        return self.ours.tokens == self.theirs.tokens

    def text(self) -> str:
        """A few lines for people."""
        lines = [f"prompt:       {self.prompt}", f"expected:     {self.expected}"]
        for name, answer in (("ours:", self.ours), ("Hugging Face:", self.theirs)):
            lines.append(f"{name:13} {answer.text.strip()}  {answer.tokens}")
        return "\n".join(lines if self.agrees else [*lines, "they differ"])


@dataclass(frozen=True)
class SideBySide:
    """The answers to a micro-batch."""

    pairs: list[Pair]

    def text(self) -> str:
        """Text for people: each prompt with both answers, and how many agree."""
        agreeing = sum(pair.agrees for pair in self.pairs)
        summary = f"the tokens agree for {agreeing} of {len(self.pairs)} prompts"
        return "\n\n".join([*(pair.text() for pair in self.pairs), summary])


def side_by_side(config: RunConfig, loaded: Loaded | None = None) -> SideBySide:
    """Generate for one micro-batch of a configuration, on one copy of the model.

    Args:
        loaded: what was loaded to choose the configuration.

    Raises:
        UserError: for anything a person can mend.
    """
    need_torch()
    e = replace(config.execution, data_parallel=1, device_iterations=1)
    config = replace(config, execution=e)
    check_least(config)
    family = family_of(config)
    table = family.weights(config)
    start = load_weights(config, table)
    data = Pipeline(config, family.sample_format, loaded or Loaded())
    corpus = data.corpus("validation").first(e.micro_batch_size)
    fitted, prompts = data.answering(corpus)
    model = compiled(lambda: Inference(fitted, family, Greedy()), "the program that generates")

    def generated(start: Start) -> np.ndarray:
        model.write(start.tensors)
        with model:
            return model.generate(prompts.words, prompts.mask)

    start, ours = start.load_with_fallback(generated)
    description = family.to_config_json(fitted)
    whole = merged(table, start.tensors, np.dtype(np.float32))
    theirs = _hugging_face(
        model_of(description, fitted.model.precision, table.base.for_files(whole)),
        prompts,
        ours.shape[1],
        data.tokenizer.pad,
    )
    answers = [_answers(tokens, data.tokenizer) for tokens in (ours, theirs)]
    return SideBySide(
        [
            Pair(prompt, example.target, *pair)
            for example, prompt, *pair in zip(corpus.examples, prompts.texts, *answers, strict=True)
        ]
    )


def _answers(tokens: np.ndarray, tokenizer: Tokenizer) -> list[Written]:
    kept = [row[row != tokenizer.pad].tolist() for row in tokens]
    return [Written(*answer) for answer in zip(kept, tokenizer.texts(kept), strict=True)]


def _hugging_face(model: Any, prompts: Prompts, length: int, pad: int) -> np.ndarray:
    """What Hugging Face's model generates greedily, prompt by prompt: int32 [n, length]."""
    out = np.full((len(prompts), length), pad, np.int32)
    for row, words, mask in zip(out, prompts.words, prompts.mask, strict=True):
        new = generate(model, words[mask == 1][None], length)[0]  # alone, it needs no padding
        row[: len(new)] = new
    return out
