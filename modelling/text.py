"""The samples that a configuration trains on, and the prompts that it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from config.errors import ConfigError
from config.screen import say
from config.sections import RunConfig
from data.loader import Samples
from data.mnli import Example, load_corpus
from data.prompts import Prompts
from modelling.spec import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def training_samples(config: RunConfig) -> Samples:
    """Load and encode the training split; says on the screen what it leaves out or cuts.

    Raises:
        UserError: the data or the tokenizer cannot be had, or do not fit the model.
    """
    tokenizer = fitting_tokenizer(config)
    corpus = load_corpus(config.data.dataset, "train")
    try:
        samples = family_of(config).encode(config, corpus.examples, tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    notes = [f"{len(samples)} training samples"]
    if len(samples) != len(corpus.examples):
        notes[0] += f" of {len(corpus.examples)} examples"
    if corpus.unlabelled:
        notes.append(f"{corpus.unlabelled} without a label left out")
    if samples.truncated:
        notes.append(f"{samples.truncated} cut to {config.model.sequence_length} tokens")
    say(", ".join(notes))
    return samples


def fitting_prompts(
    config: RunConfig, examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast
) -> tuple[RunConfig, Prompts]:
    """The examples' prompts, and the configuration of a model that they fit.

    Raises:
        UserError: they do not fit the model.
    """
    try:
        return family_of(config).prompts(config, examples, tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def fitting_tokenizer(config: RunConfig) -> PreTrainedTokenizerFast:
    """The configured tokenizer.

    Raises:
        UserError: it cannot be had, or has tokens that the model does not.
    """
    tokenizer = family_of(config).tokenizer(config)
    if len(tokenizer) > config.model.embedding.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but model.embedding.vocab_size is "
            f"{config.model.embedding.vocab_size}: set it to {len(tokenizer)} or more"
        )
    return tokenizer
