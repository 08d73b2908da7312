"""The texts of a configured run: its tokenizer, examples, training samples and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import popdist
from config.agreement import agree, digest_of
from config.errors import ConfigError
from config.sections import RunConfig
from data.batches import Samples
from data.lengths import fitted_targets
from data.prompts import Prompts
from data.task import Corpus, Example, Split, task_of
from huggingface import hub
from modelling.spec import ModelFamily
from terminal.screen import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(config: RunConfig, family: ModelFamily) -> PreTrainedTokenizerFast:
    """The configured tokenizer, by default that of the task for the family.

    Raises:
        UserError: it cannot be had, lacks what training needs, or has tokens that the model does
            not.
    """
    data = config.data
    default = family.tokenizers[data.dataset]
    tokenizer = hub.load_tokenizer(default if data.tokenizer is None else data.tokenizer)
    tokenizer = family.complete_tokenizer(config, tokenizer)
    for name in ("eos_token", "pad_token"):
        if getattr(tokenizer, f"{name}_id") is None:
            raise ConfigError(
                f"the tokenizer has no {name}: give one whose tokenizer_config.json names it"
            )
    needed = max(len(tokenizer), *(i + 1 for i in tokenizer.get_vocab().values()))
    if needed > config.model.embedding.vocab_size:
        raise ConfigError(
            f"the tokenizer has {needed} tokens, but model.embedding.vocab_size is "
            f"{config.model.embedding.vocab_size}: set it to {needed} or more"
        )
    return tokenizer


def load_corpus(config: RunConfig, family: ModelFamily, split: Split) -> Corpus:
    """The examples of a split; prompts end with what the family separates them from answers by.

    Raises:
        UserError: the data cannot be had, or do not fit the task.
    """
    corpus = task_of(config.data).corpus(split)
    separator = family.separator(config)
    if not separator:
        return corpus
    return replace(
        corpus, examples=[Example(e.prompt + separator, e.target) for e in corpus.examples]
    )


def agree_on_texts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that all processes have read the same examples and the same tokenizer, wherever from.

    Raises:
        ConfigError: they have not.
    """
    if popdist.getNumInstances() > 1:
        agree(
            {
                "number of examples": len(examples),
                "digest of the examples": digest_of([e.prompt, e.target] for e in examples),
                "digest of the tokenizer": digest_of(
                    [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
                ),
            }
        )


def training_samples(config: RunConfig, family: ModelFamily) -> Samples:
    """Load and encode the training split; says on the screen what it leaves out or cuts.

    Raises:
        UserError: the data or the tokenizer cannot be had, or do not fit the model.
    """
    tokenizer = load_tokenizer(config, family)
    corpus = load_corpus(config, family, "train")
    agree_on_texts(corpus.examples, tokenizer)
    try:
        samples = family.encode(config, corpus.examples, tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    notes = [f"{len(samples)} training samples"]
    if len(samples) != len(corpus.examples):
        notes[0] += f" of {len(corpus.examples)} examples"
    if corpus.unlabelled:
        notes.append(f"{corpus.unlabelled} without a label left out")
    say(", ".join([*notes, *samples.cuts.notes(config.model.sequence_length)]))
    return samples


def answering(
    config: RunConfig,
    family: ModelFamily,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[RunConfig, Prompts]:
    """The examples' prompts, and the configuration of a model that they and the answers fit.

    As many tokens are written as `generation.max_tokens` says, else as the longest label has, else
    as the model may write.

    Raises:
        UserError: a right answer is longer than that, unless `data.long_targets` allows it.
    """
    fitted, prompts = family.prompts(config, [e.prompt for e in examples], tokenizer)
    labels = task_of(config.data).labels
    texts = labels or [example.target for example in examples]
    tokens = list(family.answers(texts, tokenizer))
    room = config.generation.max_tokens or family.output_length(config)
    # A reference that is longer than what can be written only costs score, if that is wanted.
    try:
        fitted_targets(tokens, texts, room, config.data.long_targets, family.output_field)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if labels and config.generation.max_tokens is None:
        room = min(room, max(map(len, tokens)))
    return family.with_output_length(fitted, room), prompts
