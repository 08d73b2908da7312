"""A model family is one record: what the scripts need to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from config.sections import RunConfig
from data.loader import Samples
from data.mnli import Example
from data.prompts import Prompts
from modelling.generation.program import GeneratorOf
from modelling.layers import IGNORED
from modelling.phases.settings import Settings
from modelling.phases.training import Layout
from modelling.weights import WeightTable

RECORDS = {
    "t5": "modelling.t5.family",
    "gptj": "modelling.gptj.family",
}
"""Modules that have the families' records, called FAMILY. A run imports that of its own."""

Batch = Mapping[str, np.ndarray]
LENGTH_MULTIPLE = 8


def labelled_tokens(batch: Batch) -> int:
    """Tokens of a global batch that have a label."""
    return int(np.count_nonzero(batch["labels"] != IGNORED))


@dataclass(frozen=True)
class ModelFamily:
    """A family of models.

    Attributes:
        layout: builds the phases of training in the current Ir.
        generator: builds the graphs of generation in the current Ir.
        weights: which Hugging Face tensors are in which variables, for a configuration.
        hf_config: content of config.json beside the weights in a Hugging Face folder.
        tokenizer: the configured tokenizer.
        encode: training samples of examples: `encode(config, examples, tokenizer)`.
        prompts: what to generate from to answer examples, and the configuration with sequences no
            longer than that needs: `prompts(config, examples, tokenizer)`.
        generate: training samples of random tokens, for benchmarks: `generate(config, count)`.
        training_inputs: a global batch as the data gives it -> arrays [samples, ...] by name of
            the training program's streams.
        target_tokens: number of tokens of a global batch that the loss is the mean of; by default,
            of those that have a label.
    """

    layout: Callable[[Settings], Layout]
    generator: GeneratorOf
    weights: Callable[[Any], WeightTable]
    hf_config: Callable[[Any], dict[str, Any]]
    tokenizer: Callable[[Any], Any]
    encode: Callable[[Any, Sequence[Example], Any], Samples]
    prompts: Callable[[Any, Sequence[Example], Any], tuple[RunConfig, Prompts]]
    generate: Callable[[Any, int], Samples]
    training_inputs: Callable[[Batch], dict[str, np.ndarray]]
    target_tokens: Callable[[Batch], int] = labelled_tokens


def family_of(config: RunConfig) -> ModelFamily:
    """The record of a configuration's family."""
    family: ModelFamily = import_module(RECORDS[config.family]).FAMILY
    return family


def length_multiple(config: RunConfig) -> int:
    """What lengths of prompts are rounded up to, so that fewer different programs are compiled."""
    return math.lcm(LENGTH_MULTIPLE, config.execution.attention_serialisation)
