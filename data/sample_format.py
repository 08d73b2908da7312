"""Interface of sample formats: data/seq2seq.py and data/causal_lm.py implement it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from config.sections import RunConfig
from config.task import LossOn
from data.examples import Example, Languages
from data.samples import Batch, Prompts, Samples, get_segment_ids
from data.truncation import TokenLimit, TruncationCounts, left_truncated_indices, truncate_right

if TYPE_CHECKING:
    from data.preference_samples import PreferencePair, PreferenceSamples
    from data.rollout_samples import RolloutSamples, TokenizedRollout
    from data.tokenizer import TokenizedText, Tokenizer

LENGTH_MULTIPLE = 8

TokenInLoss = tuple[int, bool]
"""Token id, and True if it is in the loss."""


@dataclass(frozen=True)
class SampleFormat(ABC):
    """Converts examples to samples of token ids, and samples to a program's inputs.

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

    def render_prompt(self, config: RunConfig, prompt: str) -> str:
        """Prompt text as the model reads it, such as with a separator."""
        return prompt

    def render_example(self, config: RunConfig, example: Example) -> Example:
        """Convert a task's example to the text that the model reads."""
        return example.with_prompt(self.render_prompt(config, example.prompt))

    def with_data_settings(self, config: RunConfig, separator: str) -> RunConfig:
        """Complete the configuration with settings that only the data determine.

        Args:
            separator: what goes between prompts and targets in one stream.
        """
        return config

    def resolve_loss_on(self, config: RunConfig) -> LossOn:
        """Name of the assistant's turns that are in the loss, such as "last_turn"."""
        return "last_turn"

    @abstractmethod
    def tokenize(
        self, config: RunConfig, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[TokenizedText]:
        """Tokenize rendered examples to prompt and target, with the target in the loss."""

    @abstractmethod
    def make_samples(
        self,
        config: RunConfig,
        examples: Sequence[Example],
        tokenized: Sequence[TokenizedText],
        tokenizer: Tokenizer,
        for_eval: bool,
    ) -> Samples:
        """Convert tokenized examples to samples of fixed length.

        Args:
            tokenized: the examples' tokens, from `tokenize`.
            for_eval: only the targets' tokens are in the loss, whatever the training loss is.

        Raises:
            TooLongError: an example does not fit.
        """

    @abstractmethod
    def encode_texts(
        self, examples: Sequence[Example], tokenizer: Tokenizer
    ) -> Iterator[np.ndarray]:
        """Encode the prompts of examples, as whole texts, to token ids, int32 [n] each."""

    @abstractmethod
    def make_sequence_samples(
        self,
        config: RunConfig,
        sequences: Sequence[np.ndarray],
        slots: np.ndarray,
        tokenizer: Tokenizer,
        truncation: TruncationCounts,
    ) -> Samples:
        """Make samples of whole token sequences, pooled as transformers' classifiers do.

        Args:
            sequences: of at most `sequence_length` tokens each.
            slots: int64 [n, places], index of the sequence in each place, or `EMPTY_SLOT`.
            truncation: counts of sequences that were truncated.
        """

    @abstractmethod
    def make_pair_samples(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> PreferenceSamples:
        """Convert preference pairs to samples of fixed length. Raises as `make_samples`."""

    @abstractmethod
    def make_rollout_samples(
        self,
        config: RunConfig,
        rollouts: Sequence[TokenizedRollout],
        examples: Sequence[Example],
        tokenizer: Tokenizer,
    ) -> RolloutSamples:
        """Convert rollouts to samples of fixed length. Raises as `make_samples`.

        Args:
            examples: of all rows, with which the rewards are compared.
        """

    @abstractmethod
    def fit_length_to_pairs(
        self, config: RunConfig, pairs: Sequence[PreferencePair], tokenizer: Tokenizer
    ) -> tuple[RunConfig, list[PreferencePair]]:
        """Choose sequence lengths that fit all preference pairs.

        Prompts are truncated as by `make_prompts`.
        """

    @abstractmethod
    def make_prompts(
        self,
        config: RunConfig,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        languages: Sequence[Languages] = (),
    ) -> tuple[RunConfig, Prompts]:
        """Tokenize prompts for generation, with a configuration that fits their lengths.

        Args:
            languages: of the prompts and their answers; empty: unknown.
        """

    @abstractmethod
    def encode_targets(
        self,
        config: RunConfig,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        languages: Sequence[Languages] = (),
    ) -> list[np.ndarray]:
        """Token ids of targets as the model generates them, the end token included.

        Args:
            languages: as for `make_prompts`.
        """

    @abstractmethod
    def count_example_tokens(self, tokenized: TokenizedText) -> tuple[int, int]:
        """Count the tokens of an example in a sample, and of its target."""

    @abstractmethod
    def count_predicted_positions(self, config: RunConfig) -> int:
        """Number of positions in a sample at which the model predicts a token."""

    @abstractmethod
    def make_random_samples(
        self, config: RunConfig, count: int, mean_tokens: float | None
    ) -> Samples:
        """Make samples of random tokens, for benchmarks.

        Args:
            mean_tokens: of a prompt, lengths being log-normal; None: as the shape likes.
        """

    @abstractmethod
    def to_program_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays of a batch by the program input stream that reads them.

        A program uses the streams that it has.
        """

    @abstractmethod
    def sequences_with_loss_mask(self, batch: Batch) -> list[list[TokenInLoss]]:
        """Sequences of a batch as token ids with their loss masks, for a preview."""

    @abstractmethod
    def count_non_padding_tokens(self, batch: Batch) -> int:
        """Count the tokens of a batch that are not padding."""

    def output_length(self, config: RunConfig) -> int:
        """Configured maximum number of generated tokens per answer."""
        return int(getattr(config.model, self.output_field))

    def max_new_tokens(self, config: RunConfig) -> int:
        """Maximum number of tokens that a generated answer has, including the end token.

        A preset's limit is for its own task. For other data the model may write as many tokens as a
        text may have, or `generation.max_tokens`.
        """
        limit = self.output_length(config)
        is_user_data = config.data.train is not None or config.data.validation is not None
        return config.generation.max_tokens or (
            max(limit, config.model.sequence_length) if is_user_data else limit
        )

    def target_token_limit(self, config: RunConfig) -> TokenLimit:
        """Maximum number of tokens that a target has in training."""
        max_positions = config.model.max_position_embeddings
        return TokenLimit(self.output_length(config), self.output_field, max_positions)

    def with_output_length(self, config: RunConfig, length: int) -> RunConfig:
        """Copy of the configuration with this maximum number of generated tokens."""
        fields: dict[str, Any] = {self.output_field: length}
        return replace(config, model=replace(config.model, **fields))


def sequences_without_loss(batch: Batch) -> list[list[TokenInLoss]]:
    """Sequences of a batch without labels, no token of which is in the loss."""
    return [
        [(int(token), False) for token in input_ids[segment_ids == number]]
        for input_ids, segment_ids in zip(batch["input_ids"], get_segment_ids(batch), strict=True)
        for number in range(1, int(segment_ids.max(initial=0)) + 1)
    ]


def length_multiple(config: RunConfig) -> int:
    """Multiple to which prompt lengths are rounded up, so that fewer programs are compiled."""
    return math.lcm(LENGTH_MULTIPLE, config.execution.num_query_chunks)


def truncate_prompt_ids(
    rows: Sequence[np.ndarray], tokenizer: Tokenizer, length: int, truncate_left: bool
) -> tuple[list[np.ndarray], int]:
    """Truncate tokenized prompts; returns them and the number of truncated ones."""

    def truncate(ids: np.ndarray) -> np.ndarray:
        if not truncate_left:
            return truncate_right(ids, length, tokenizer.num_end_tokens)
        num_fixed = tokenizer.count_leading_special_tokens(ids)
        return ids[left_truncated_indices(len(ids), length, num_fixed)]

    truncated = [truncate(ids) if len(ids) > length else ids for ids in rows]
    return truncated, sum(len(ids) > length for ids in rows)


def pad_prompts(
    config: RunConfig,
    texts: Sequence[str],
    rows: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    multiple: int,
    truncate_left: bool,
) -> tuple[RunConfig, Prompts]:
    """Truncate and pad the tokens `rows` of prompts, with a configuration of their length."""
    max_tokens = config.model.sequence_length
    rows, num_truncated = truncate_prompt_ids(rows, tokenizer, max_tokens, truncate_left)
    input_ids, mask = pad_right(rows, max_tokens, multiple, tokenizer.pad_token_id)
    fitting = replace(config, model=replace(config.model, sequence_length=input_ids.shape[1]))
    return fitting, Prompts(texts, input_ids, mask, num_truncated)


def pad_right(
    rows: Sequence[np.ndarray], max_length: int, multiple: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pad token sequences on the right; returns ids and mask (1 = token), int32 [n, length].

    Args:
        rows: each of at most `max_length` tokens.
        multiple: the length is a multiple of it, if that is at most `max_length`.

    Returns:
        int32 [n, length] both.
    """
    longest = max(map(len, rows), default=1)
    length = min(-(-longest // multiple) * multiple, max_length)
    input_ids = np.full((len(rows), length), pad, np.int32)
    mask = np.zeros_like(input_ids)
    for i, ids in enumerate(rows):
        input_ids[i, : len(ids)], mask[i, : len(ids)] = ids, 1
    return input_ids, mask
