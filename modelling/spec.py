"""A model family is one record: what the scripts need to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.families import FAMILIES
from config.sections import RunConfig
from data.batches import Samples
from data.dealing import Batch as Batch
from data.prompts import Prompts
from data.task import Example
from files.json_files import Fields
from files.shown import shown
from modelling.generation.program import GeneratorOf
from modelling.generation.streamed import StreamedOf
from modelling.layers import IGNORED
from modelling.phases.settings import Settings
from modelling.phases.training import Layout
from modelling.weights import WeightTable

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
        streamed: builds those of generation layer by layer; None: the family has none.
        weights: which Hugging Face tensors are in which variables, for a configuration.
        hf_config: content of config.json beside the weights in a Hugging Face folder.
        sizes: the inverse: fields of the model's configuration, from a config.json. Raises
            ConfigError if that is of a model which the family does not have.
        tokenizers: names of the tokenizers of the tasks that come with the program; that of "mnli"
            is the published models'.
        encode: training samples of examples: `encode(config, examples, tokenizer)`.
        evaluated: samples whose labels are the targets' tokens alone; arguments as for `encode`.
        prompts: texts to generate from, and the configuration with sequences no longer than that
            needs: `prompts(config, texts, tokenizer)`.
        answers: tokens of each text as the model has to write it: `answers(texts, tokenizer)`.
        output_field: field of the model's configuration that limits what is written.
        tokens: number of tokens that a global batch holds, padding left out; by default, of those
            that have a label: `tokens(config, batch)`.
        separator: text between a prompt and what the model writes.
        complete_tokenizer: adds what the model needs to a tokenizer that was loaded. Raises
            ConfigError if it is not one for the family.
        generate: training samples of random tokens, for benchmarks: `generate(config, count,
            mean_tokens)`; see `data.generated`.
        training_inputs: a global batch as the data gives it -> arrays [samples, ...] by name of
            the training program's streams.
        target_tokens: number of tokens of a global batch that the loss is the mean of; by default,
            of those that have a label.
    """

    layout: Callable[[Settings], Layout]
    generator: GeneratorOf
    weights: Callable[[Any], WeightTable]
    hf_config: Callable[[Any], dict[str, Any]]
    sizes: Callable[[Fields], dict[str, Any]]
    tokenizers: Mapping[str, str]
    encode: Callable[[Any, Sequence[Example], Any], Samples]
    evaluated: Callable[[Any, Sequence[Example], Any], Samples]
    prompts: Callable[[Any, Sequence[str], Any], tuple[RunConfig, Prompts]]
    answers: Callable[[Sequence[str], Any], Iterable[np.ndarray]]
    output_field: str
    generate: Callable[[Any, int, float | None], Samples]
    training_inputs: Callable[[Batch], dict[str, np.ndarray]]
    target_tokens: Callable[[Batch], int] = labelled_tokens
    streamed: StreamedOf | None = None
    tokens: Callable[[Any, Batch], int] = lambda config, batch: labelled_tokens(batch)
    separator: Callable[[Any], str] = lambda config: ""
    complete_tokenizer: Callable[[Any, Any], Any] = lambda config, tokenizer: tokenizer

    def output_length(self, config: RunConfig) -> int:
        """Most tokens that the configured model writes, the end token included."""
        return int(getattr(config.model, self.output_field))

    def with_output_length(self, config: RunConfig, length: int) -> RunConfig:
        """The configuration of a model that writes so many tokens at most."""
        changed: dict[str, Any] = {self.output_field: length}
        return replace(config, model=replace(config.model, **changed))


def family_of(config: RunConfig) -> ModelFamily:
    """The record of a configuration's family."""
    return family_named(config.family)


def family_named(name: str) -> ModelFamily:
    """The record of a family of the registry."""
    family: ModelFamily = import_module(FAMILIES[name].record).FAMILY
    return family


def length_multiple(config: RunConfig) -> int:
    """What lengths of prompts are rounded up to, so that fewer different programs are compiled."""
    return math.lcm(LENGTH_MULTIPLE, config.execution.attention_serialisation)


def check_values(
    data: Mapping[str, Any], needed: Mapping[str, tuple[Any, Any]], known: str
) -> None:
    """Raise ConfigError if a config.json has a value that a family does not compute with.

    Args:
        needed: by name, the value it must have, and Hugging Face's where it is left out.
        known: what is known, for the message.
    """
    for name, (value, default) in needed.items():
        found = data.get(name)
        if (default if found is None else found) != value:
            raise ConfigError(
                f"the model's config.json has {name} {shown(found)}, but must have {value}: {known}"
            )
