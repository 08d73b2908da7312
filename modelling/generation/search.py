"""Interfaces of decoding strategies and of their searches, which choose the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

import popxl
from config.model import ModelSection
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.layers import ParallelGroups
from popxl import Tensor, TensorSpec, ops


@dataclass(frozen=True)
class SpecialTokenIds:
    """Token ids with a special role in generation: start, end, padding, forced, suppressed.

    Attributes:
        eos_token_id: the last token of a sequence.
        pad_token_id: fills a sequence after its end.
        extra_eos_token_ids: further tokens that end a sequence.
        start_token_id: the first token that a decoder reads in an encoder-decoder; None:
            `pad_token_id`.
        forced_token_ids: the first token of every sequence, and the last one of a sequence of full
            length; None: no token is forced.
        suppressed_token_ids: tokens that are never generated.
    """

    eos_token_id: int
    pad_token_id: int
    extra_eos_token_ids: tuple[int, ...] = ()
    start_token_id: int | None = None
    forced_token_ids: tuple[int | None, int | None] = (None, None)
    suppressed_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_model_config(cls, model_config: ModelSection) -> SpecialTokenIds:
        """Return the special token ids of a model configuration."""
        extra = (
            model_config.extra_eos_token_ids,
            model_config.start_token_id,
            model_config.forced_token_ids,
            model_config.suppressed_token_ids,
        )
        return cls(model_config.eos_token_id, model_config.pad_token_id, *extra)

    @property
    def decoder_start_token_id(self) -> int:
        return self.pad_token_id if self.start_token_id is None else self.start_token_id

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Mask of the tokens that end a sequence: int32, any shape -> bool, same shape."""
        mask, *others = (
            ops.equal(tokens, popxl.constant(end, popxl.int32, "end"))
            for end in (self.eos_token_id, *self.extra_eos_token_ids)
        )
        for other in others:
            mask = ops.logical_or(mask, other)
        return mask


@dataclass(frozen=True)
class SearchContext:
    """Settings and helpers of all searches: groups, special tokens, logits processors.

    Attributes:
        groups: the vocabulary is sharded over tensor parallelism; member r has the r-th shard.
        length: largest number of tokens of a sequence.
        processors: change the scores and end sequences.
    """

    groups: ParallelGroups
    special_tokens: SpecialTokenIds
    length: int
    logits_processors: LogitsProcessors = NO_PROCESSORS

    def process_scores(
        self, scores: Tensor, position: Tensor, generated: Tensor, history: list[Tensor]
    ) -> Tensor:
        """Apply logits processors to the logits, and suppress or force tokens, as configured.

        (sequences, local vocabulary) -> same shape. A suppressed token gets the score -inf; a
        forced one gets 0 and all others -inf, as in transformers. Arguments as for
        `LogitsProcessors.process_scores`.
        """
        scores = self.logits_processors.process_scores(
            scores, position, generated, history, self.groups
        )
        for token_id in self.special_tokens.suppressed_token_ids:
            suppressed = self._is_column(popxl.constant(token_id, popxl.int32), scores.shape[1])
            scores = ops.where(suppressed, popxl.constant(-np.inf, popxl.float32), scores)
        for forced_position, token in zip(
            (0, self.length - 1), self.special_tokens.forced_token_ids, strict=True
        ):
            if token is not None:
                constant = popxl.constant(token, popxl.int32)
                scores = self.force_token(scores, constant, position, forced_position)
        return scores

    def force_token(
        self, scores: Tensor, token: Tensor, position: Tensor, forced_position: int
    ) -> Tensor:
        """Allow one token only at a position: float32 (sequences, local vocabulary) -> same shape.

        Args:
            token: int32 scalar, or (sequences, 1).
        """
        is_forced = ops.equal(position, popxl.constant(forced_position, popxl.int32))
        return ops.where(is_forced, self._one_token(token, scores.shape[1]), scores)

    def _one_token(self, token: Tensor, local_size: int) -> Tensor:
        """Scores that allow only one token: float32 (1 or sequences, local vocabulary)."""
        zero, forbidden = (popxl.constant(x, popxl.float32) for x in (0.0, -np.inf))
        return ops.where(self._is_column(token, local_size), zero, forbidden)

    def _is_column(self, token: Tensor, local_size: int) -> Tensor:
        """True in the scores' column of a token: bool (1 or sequences, local vocabulary)."""
        columns: Tensor = popxl.constant(np.arange(local_size)[None], popxl.int32, "columns")
        if self.groups.tensor_parallel > 1:
            columns = columns + self.groups.tp_rank() * local_size
        return ops.equal(columns, token)

    def gather_vocabulary(self, x: Tensor) -> Tensor:
        """All-gather over the tensor-parallel group: (rows, n) -> (rows, group size * n)."""
        members = self.groups.tensor_parallel
        if members == 1:
            return x
        parts = ops.collectives.replicated_all_gather(
            x, group=self.groups.tp, output_shape="new_axis"
        )
        rows, n = x.shape
        return ops.transpose(parts, (1, 0, 2)).reshape((rows, members * n))


class SearchStepResult(NamedTuple):
    """Result of one decoding step of a search: the chosen tokens and the search's new state.

    Attributes:
        input_ids: int32 (sequences, 1), the tokens to read next.
        beam_idx: int32 (sequences,), the sequence whose caches each one continues; None: its own.
        state: the new state of the search.
    """

    input_ids: Tensor
    beam_idx: Tensor | None
    state: list[Tensor]


class Search(Protocol):
    """Interface: chooses the tokens of a batch of prompts; methods add ops to the current graph.

    It decodes `DecodingStrategy.sequences_per_prompt` sequences for each prompt, next to each other
    in the batch. Its state is tensors that the decoding loop carries. Replicas of a tensor-parallel
    group choose equal tokens.
    """

    def init_state(
        self, is_real_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the search's initial state, before the first token is chosen.

        Args:
            is_real_prompt: bool (prompts,), false for rows that only fill up the batch.
            prompt_tokens: int32 (prompts, n), the tokens that the decoder reads before the first
                new one, padded on the left with -1.
            inputs: tensors with the specs of `DecodingStrategy.input_specs`.
        """
        ...

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStepResult:
        """Choose the next token of each sequence from its logits.

        Args:
            logits: float32 (sequences, local vocabulary).
            position: position of the chosen token, int32 scalar, from 0.
        """
        ...

    def unfinished_prompts(self, state: list[Tensor]) -> Tensor:
        """Mask of the prompts that need more tokens: bool (prompts,)."""
        ...

    def output_tokens(self, state: list[Tensor]) -> Tensor:
        """Return the generated tokens, padded after the end token: int32 (prompts, length)."""
        ...


class DecodingStrategy(Protocol):
    """Interface: settings of a decoding strategy, from which a program creates its `Search`."""

    @property
    def sequences_per_prompt(self) -> int:
        """Number of sequences decoded for each prompt."""
        ...

    @property
    def logits_processors(self) -> LogitsProcessors:
        """Logits processors that the strategy's search applies."""
        ...

    def input_specs(self, num_prompts: int, length: int) -> Mapping[str, TensorSpec]:
        """Specs of the search's inputs besides logits, by name: (prompts, ...) per micro-batch."""
        ...

    def input_arrays(self, prompt_indices: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        """Host arrays for the inputs that `input_specs` describes, by name.

        Args:
            prompt_indices: int (n,), index of each prompt among all prompts, so that results do not
                depend on batches and devices; -1: no prompt.
        """
        ...

    def create_search(self, context: SearchContext) -> Search:
        """Create the search from these settings, in the current Ir."""
        ...
