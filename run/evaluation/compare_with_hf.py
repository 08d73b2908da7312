"""Compare generated answers with those of Hugging Face's model, for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config.sections import RunConfig
from data.data_cache import DataCache
from data.pipeline import Pipeline
from data.samples import Prompts
from data.tokenizer import Tokenizer
from huggingface.torch_model import NEEDS_TORCH, build_torch_model, generate_greedily, has_torch
from modelling.generation import GreedyStrategy
from modelling.generation.decoding_strategy import with_forced_tokens
from modelling.model_family import get_family
from modelling.weights.lora import merge_adapters
from planning.hardware.memory_check import check_lower_bound
from run.initial_state import InitialState
from run.weight_loading import load_weights
from sessions.generation import GenerationSession
from sessions.session import compile_session


@dataclass(frozen=True)
class GeneratedText:
    """Token ids that a program generated, without padding, and their text."""

    tokens: list[int]
    text: str


@dataclass(frozen=True)
class AnswerComparison:
    """Answers of this program and Hugging Face's model to a prompt.

    `hf_output` is None without PyTorch.
    """

    prompt: str
    expected: str
    popxl_output: GeneratedText
    hf_output: GeneratedText | None

    @property
    def tokens_match(self) -> bool:
        """True if both programs generated the same tokens."""
        return self.hf_output is not None and self.popxl_output.tokens == self.hf_output.tokens

    def text(self) -> str:
        """Format the prompt, the expected answer and both programs' answers as text."""
        lines = [f"prompt:       {self.prompt}", f"expected:     {self.expected}"]
        for name, answer in (("ours:", self.popxl_output), ("Hugging Face:", self.hf_output)):
            if answer is not None:
                lines.append(f"{name:13} {answer.text.strip()}  {answer.tokens}")
        differs = self.hf_output is not None and not self.tokens_match
        return "\n".join([*lines, "they differ"] if differs else lines)


@dataclass(frozen=True)
class HfComparison:
    """Answers to a micro-batch of prompts, compared with Hugging Face's model."""

    pairs: list[AnswerComparison]

    def text(self) -> str:
        """Format all prompts with both programs' answers, and the number of equal answers."""
        num_matching = sum(pair.tokens_match for pair in self.pairs)
        summary = f"the tokens agree for {num_matching} of {len(self.pairs)} prompts"
        if any(pair.hf_output is None for pair in self.pairs):
            summary = f"not compared: {NEEDS_TORCH}"
        return "\n\n".join([*(pair.text() for pair in self.pairs), summary])


def compare_with_hf(config: RunConfig, data_cache: DataCache | None = None) -> HfComparison:
    """Generate answers to a micro-batch of prompts, and compare them with Hugging Face's model.

    Args:
        data_cache: data that is already loaded; None: nothing.

    Raises:
        UserError: an error that a user can fix.
    """
    e = replace(config.execution, data_parallel=1, device_iterations=1)
    config = replace(config, execution=e)
    check_lower_bound(config)
    family = get_family(config)
    weight_map = family.weight_map(config)
    start = load_weights(config, weight_map)
    data = Pipeline(config, family.sample_format, data_cache or DataCache())
    corpus = data.read_corpus("validation").first_examples(e.micro_batch_size)
    resolved_config, prompts = data.make_eval_prompts(corpus)
    model = compile_session(
        lambda: GenerationSession(resolved_config, with_forced_tokens(GreedyStrategy(), prompts)),
        "the program that generates",
    )

    def run_model(start: InitialState) -> np.ndarray:
        model.write(start.tensors)
        with model:
            return model.generate(prompts.input_ids, prompts.mask)

    start, popxl_output = start.load_with_fallback(run_model)
    popxl_answers = _decode_answers(popxl_output, data.tokenizer)
    hf_answers: Sequence[GeneratedText | None] = [None] * len(popxl_answers)
    if has_torch():
        hf_config = family.to_config_json(resolved_config)
        merged = weight_map.without_adapters.to_hf(
            merge_adapters(weight_map, start.tensors, np.dtype(np.float32))
        )
        hf_output = build_torch_model(hf_config, resolved_config.model.precision, merged)
        tokens = _generate_with_hf(
            hf_output, prompts, popxl_output.shape[1], data.tokenizer.pad_token_id
        )
        hf_answers = _decode_answers(tokens, data.tokenizer)
    targets = [example.target for example in corpus.examples]
    pairs = zip(prompts.texts, targets, popxl_answers, hf_answers, strict=True)
    return HfComparison([AnswerComparison(*pair) for pair in pairs])


def _decode_answers(tokens: np.ndarray, tokenizer: Tokenizer) -> list[GeneratedText]:
    unpadded = [row[row != tokenizer.pad_token_id].tolist() for row in tokens]
    return [
        GeneratedText(*answer) for answer in zip(unpadded, tokenizer.decode(unpadded), strict=True)
    ]


def _generate_with_hf(model: Any, prompts: Prompts, length: int, pad: int) -> np.ndarray:
    """Generate greedily with Hugging Face's model, prompt by prompt: int32 (prompts, length)."""
    out = np.full((len(prompts), length), pad, np.int32)
    for i, (row, input_ids, mask) in enumerate(
        zip(out, prompts.input_ids, prompts.mask, strict=True)
    ):
        settings: dict[str, Any] = {}
        if prompts.forced_tokens is not None:
            settings["forced_bos_token_id"] = int(prompts.forced_tokens[i])
        # A single prompt needs no padding.
        (new,) = generate_greedily(model, input_ids[mask == 1][None], length, **settings)
        row[: len(new)] = new
    return out
