"""The format of a model's samples: seq2seq (data/seq2seq.py) or causal LM (data/causal_lm.py)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config.sections import RunConfig
from config.task import LossOn
from data.examples import Example
from data.preference_samples import PreferencePair, PreferenceSamples
from data.samples import Batch, Prompts, Samples, TokenLimit
from data.tokenizer import TokenizedText, Tokenizer

LENGTH_MULTIPLE = 8

TokenInLoss = tuple[int, bool]
"""A token, and whether it is learned."""


@dataclass(frozen=True)
class SampleFormat(ABC):
    """How texts become samples, and samples a program's inputs.

    Attributes:
        name: for people.
        sample_tokenizer: folder of the sample corpus's tokenizer, in data/sample.
        output_field: field of the model's configuration that limits what is written.
        trains_whole_chats: whether a conversation is one text with all its answers; else its last
            answer is the target, and what precedes it the prompt.
    """

    name: str
    sample_tokenizer: str
    output_field: str
    trains_whole_chats: bool = False

    def prompt_text(self, config: RunConfig, prompt: str) -> str:
        """The text that a model is given for a prompt."""
        return prompt

    def render(self, config: RunConfig, example: Example) -> Example:
        """An example of a task as the model is given it."""
        return example.with_prompt(self.prompt_text(config, example.prompt))

    def resolve(self, config: RunConfig, separator: str) -> RunConfig:
        """The configuration with what only the data can tell.

        Args:
            separator: what goes between prompts and targets in one stream.
        """
        return config

    def loss_scope(self, config: RunConfig) -> LossOn:
        """Which of the assistant's turns are learned."""
        return "last_turn"

    @abstractmethod
    def tokenize(
        self, config: RunConfig, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[TokenizedText]:
        """The tokens of examples, which are as `example` makes them: of the text, or those of the
        prompt and then those of the target, which are learned."""

    @abstractmethod
    def make_samples(
        self,
        config: RunConfig,
        examples: Sequence[Example],
        tokens: Sequence[TokenizedText],
        tokenizer: Tokenizer,
        for_eval: bool,
    ) -> Samples:
        """Samples of examples.

        Args:
            tokens: of the examples, as `encoded` makes them.
            for_eval: the targets' tokens alone have labels, whatever is learned in training.

        Raises:
            TooLong: an example does not fit.
        """

    @abstractmethod
    def make_pair_samples(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> PreferenceSamples:
        """Samples of preferences. Raises as `samples`."""

    @abstractmethod
    def fit_pairs(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> tuple[RunConfig, list[PreferencePair]]:
        """A configuration whose samples hold pairs, with prompts as `prompts` cuts them."""

    @abstractmethod
    def make_prompts(
        self, config: RunConfig, texts: Sequence[str], tokenizer: Tokenizer
    ) -> tuple[RunConfig, Prompts]:
        """Texts to generate from, and the configuration of a model with sequences no longer than
        the longest of them needs."""

    @abstractmethod
    def encode_targets(
        self, config: RunConfig, texts: Sequence[str], tokenizer: Tokenizer
    ) -> list[np.ndarray]:
        """The tokens of each target as the model has to write it, the end token included."""

    @abstractmethod
    def count_example_tokens(self, tokens: TokenizedText) -> tuple[int, int]:
        """Tokens that a sample holds of an example, and those of its target."""

    @abstractmethod
    def num_predictions(self, config: RunConfig) -> int:
        """Positions of a sample that predict a token."""

    @abstractmethod
    def random_samples(self, config: RunConfig, count: int, mean_tokens: float | None) -> Samples:
        """Samples of random tokens, for benchmarks.

        Args:
            mean_tokens: of a prompt, lengths being log-normal; None: as the shape likes.
        """

    @abstractmethod
    def program_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """What training programs read of a batch, by the names of their streams. A program takes
        those that it has."""

    @abstractmethod
    def tokens_in_loss(self, batch: Batch) -> list[list[TokenInLoss]]:
        """The texts of a batch, one after the other, for people."""

    @abstractmethod
    def count_tokens(self, batch: Batch) -> int:
        """Tokens of a batch, padding left out."""

    def output_length(self, config: RunConfig) -> int:
        """Tokens that the model was configured to write."""
        return int(getattr(config.model, self.output_field))

    def max_new_tokens(self, config: RunConfig) -> int:
        """Most tokens that the configured model writes, the end token included.

        A preset's limit is for its own task. For other data the model may write as many tokens as a
        text may have, or `generation.max_tokens`.
        """
        limit = self.output_length(config)
        own = config.data.train is not None or config.data.validation is not None
        return config.generation.max_tokens or (
            max(limit, config.model.sequence_length) if own else limit
        )

    def target_limit(self, config: RunConfig) -> TokenLimit:
        """Most tokens of a target in training."""
        made_for = config.model.max_position_embeddings
        return TokenLimit(self.output_length(config), self.output_field, made_for)

    def with_output_length(self, config: RunConfig, length: int) -> RunConfig:
        """The configuration of a model that writes so many tokens at most."""
        changed: dict[str, Any] = {self.output_field: length}
        return replace(config, model=replace(config.model, **changed))


def length_multiple(config: RunConfig) -> int:
    """Lengths of prompts are rounded up to a multiple of this, so that fewer programs are
    compiled."""
    return math.lcm(LENGTH_MULTIPLE, config.execution.attention_slices)


def pad_right(
    rows: Sequence[np.ndarray], most: int, multiple: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens, padded on the right to the longest, and the mask, 1 = token.

    Args:
        rows: each of at most `most` tokens.
        multiple: the length is a multiple of it, if that is at most `most`.

    Returns:
        int32 [n, length] both.
    """
    longest = max(map(len, rows), default=1)
    length = min(-(-longest // multiple) * multiple, most)
    input_ids = np.full((len(rows), length), pad, np.int32)
    mask = np.zeros_like(input_ids)
    for i, ids in enumerate(rows):
        input_ids[i, : len(ids)], mask[i, : len(ids)] = ids, 1
    return input_ids, mask
