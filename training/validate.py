"""The validation run: generate an answer to every prompt of the validation set, and count.

Generation is greedy. Prompts are padded to the longest one of the set, and as many tokens are
generated as the longest answer has.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from config.cli import CommandLine
from config.errors import ConfigError
from config.sections import RunConfig
from data.encoding import IGNORE_INDEX, EncodedExamples, encode
from data.mnli import (
    LABEL_WORDS,
    Corpus,
    encoder_prompt,
    load_corpus,
    load_tokenizer,
    read_answer,
)
from inference import Inference
from modelling.spec import family_of
from training.checkpoint import CheckpointStore, has_checkpoint
from training.run_directory import choose_path
from training.start import Start, load_weights
from training.validation_report import Answer, ValidationReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LENGTH_MULTIPLE = 8
"""Prompt lengths are rounded up to it: vector units like it, and fewer programs are compiled."""


def validate(line: CommandLine) -> ValidationReport:
    """Validate as the command line says, and write validation.json.

    Raises:
        UserError: for anything a person can mend.
    """
    config = line.config
    start = load_weights(config, family_of(config).weights(config))
    corpus = load_corpus(config.data.dataset, "validation")
    tokenizer = load_tokenizer(config.data.dataset, config.data.tokenizer)
    encoded = _encoded(config, corpus, tokenizer)
    model = _compiled(_fitted(config, encoded))
    model.write(start.tensors)
    begin = time.perf_counter()
    texts = tokenizer.batch_decode(_generated(model, encoded), skip_special_tokens=True)
    seconds = time.perf_counter() - begin
    report = ValidationReport(
        LABEL_WORDS,
        _answers(corpus, texts),
        _facts(config, start, corpus, encoded) | {"seconds": round(seconds, 3)},
    )
    path = report.write(_directory(line))
    _say(f"{len(texts)} answers in {seconds:.1f} s; details are in {path}")
    return report


def _encoded(
    config: RunConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerFast
) -> EncodedExamples:
    """The prompts and right answers as tokens.

    Raises:
        ConfigError: the model has no room for an answer, or for the tokenizer's vocabulary.
    """
    model = config.model
    if len(tokenizer) > model.embedding.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but model.embedding.vocab_size is "
            f"{model.embedding.vocab_size}: give the tokenizer that the model was trained with"
        )
    try:
        return encode(
            corpus.examples, tokenizer, model.sequence_length, model.decoder_sequence_length
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _fitted(config: RunConfig, encoded: EncodedExamples) -> RunConfig:
    """The configuration with sequences no longer than the data need."""
    multiple = math.lcm(LENGTH_MULTIPLE, config.execution.attention_serialisation)
    longest = int(np.diff(encoded.starts).max())
    answer = int(np.count_nonzero(encoded.targets != IGNORE_INDEX, axis=1).max())
    model = replace(
        config.model,
        sequence_length=min(config.model.sequence_length, math.ceil(longest / multiple) * multiple),
        decoder_sequence_length=answer,
    )
    return replace(config, model=model)


def _compiled(config: RunConfig) -> Inference:
    """The model, with a word on the screen before a wait."""
    _say(f"compiling for {config.replicas} device(s)")
    start = time.perf_counter()
    model = Inference(config)
    _say(f"ready after {time.perf_counter() - start:.1f} s")
    return model


def _generated(model: Inference, encoded: EncodedExamples) -> np.ndarray:
    """The tokens of all answers, int32 [samples, tokens of the longest right answer]."""
    samples, at_once = len(encoded), model.samples_per_run
    parts = []
    # Without a terminal there is no bar: a log of its states would tell nobody anything.
    with model, tqdm(total=samples, unit="sample", disable=None, dynamic_ncols=True) as bar:
        for first in range(0, samples, at_once):
            batch = encoded.take(np.arange(first, min(first + at_once, samples)))
            parts.append(model.generate(batch["input_ids"], batch["attention_mask"]))
            bar.update(len(parts[-1]))
    return np.concatenate(parts)


def _answers(corpus: Corpus, texts: Sequence[str]) -> list[Answer]:
    return [
        Answer(encoder_prompt(example), text, example.label, read_answer(text))
        for example, text in zip(corpus.examples, texts, strict=True)
    ]


def _facts(
    config: RunConfig, start: Start, corpus: Corpus, encoded: EncodedExamples
) -> dict[str, Any]:
    return {
        "weights": start.source,
        "step": start.step,
        "dataset": config.data.dataset,
        "left_out_without_label": corpus.unlabelled,
        "prompts_cut": encoded.truncated,
    }


def _directory(line: CommandLine) -> Path:
    """Where the report goes: what --out names, else beside the checkpoints, else a new one."""
    load = line.config.checkpoint.load
    if line.options.out or load is None or not has_checkpoint(load):
        return choose_path(line.options.out, None, f"validation-{Path(line.preset).stem}")
    is_one_step = not CheckpointStore(load).steps()
    return Path(load).parent if is_one_step else Path(load)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
