"""Search strategies: they choose tokens, and carry state from one position to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

import popxl
from config.model import AnyModel
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.layers import ParallelGroups
from popxl import Tensor, TensorSpec, ops


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens with a meaning for generation.

    Attributes:
        eos_token_id: the last token of a sequence.
        pad_token_id: fills a sequence after its end.
        extra_eos_token_ids: further tokens that end a sequence.
        start_token_id: the first token that a decoder reads in an encoder-decoder; None:
            `pad_token_id`.
        forced_token_ids: the first token of every sequence, and the last one of a sequence of full
            length; None: no token is forced.
    """

    eos_token_id: int
    pad_token_id: int
    extra_eos_token_ids: tuple[int, ...] = ()
    start_token_id: int | None = None
    forced_token_ids: tuple[int | None, int | None] = (None, None)

    @classmethod
    def from_model(cls, model: AnyModel) -> SpecialTokens:
        """Return the special tokens of a configured model."""
        others = model.further_ends, model.start_token, model.forced_tokens
        return cls(model.eos_token_id, model.pad_token_id, *others)

    @property
    def decoder_start_token_id(self) -> int:
        return self.pad_token_id if self.start_token_id is None else self.start_token_id

    def is_end(self, tokens: Tensor) -> Tensor:
        """Return a mask of the tokens that end a sequence: int32, any shape -> bool, same shape."""
        first, *others = (
            ops.equal(tokens, popxl.constant(end, popxl.int32, "end"))
            for end in (self.eos_token_id, *self.extra_eos_token_ids)
        )
        for other in others:
            first = ops.logical_or(first, other)
        return first


@dataclass(frozen=True)
class SearchContext:
    """What a search works with.

    Attributes:
        groups: the vocabulary is cut over tensor parallelism; member r has the r-th part.
        length: most tokens of a sequence.
        rules: change what it chooses from, and where it ends.
    """

    groups: ParallelGroups
    special_tokens: SpecialTokens
    length: int
    processors: LogitsProcessors = NO_PROCESSORS

    def scores(
        self, scores: Tensor, position: Tensor, generated: Tensor, history: list[Tensor]
    ) -> Tensor:
        """The scores of tokens as the rules leave them; where a token is forced, those of others
        are -inf and its own 0, as transformers has them. Arguments as for `Rules.scores`."""
        scores = self.processors.scores(scores, position, generated, history, self.groups)
        for place, token in zip(
            (0, self.length - 1), self.special_tokens.forced_token_ids, strict=True
        ):
            if token is not None:
                here = ops.equal(position, popxl.constant(place, popxl.int32))
                scores = ops.where(here, self._only(token, scores.shape[1]), scores)
        return scores

    def _only(self, token: int, part: int) -> Tensor:
        """Scores that leave one token: float32 (1, part of the vocabulary)."""
        columns: Tensor = popxl.constant(np.arange(part)[None], popxl.int32, "columns")
        if self.groups.tensor_parallel > 1:
            columns = columns + self.groups.tp_rank() * part
        zero, never = (popxl.constant(x, popxl.float32) for x in (0.0, -np.inf))
        return ops.where(ops.equal(columns, popxl.constant(token, popxl.int32)), zero, never)


class SearchStep(NamedTuple):
    """One position of a search.

    Attributes:
        input_ids: int32 (sequences, 1), the tokens to read next.
        parents: int32 (sequences,), the sequence whose caches each one continues; None: its own.
        state: as `Search.start` gives it, updated.
    """

    input_ids: Tensor
    beam_idx: Tensor | None
    state: list[Tensor]


class Search(Protocol):
    """Chooses the tokens of a batch of prompts; its methods add ops to the current graph.

    It decodes `Strategy.sequences` sequences for each prompt, one after the other in the batch. Its
    state is tensors that the loop over positions carries. Replicas of a tensor-parallel group
    choose the same tokens.
    """

    def start(
        self, has_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The state before the first token.

        Args:
            prompted: bool (prompts,), false for those that only fill up the batch.
            read: int32 (prompts, n), all tokens that the decoder reads before it chooses one; -1 in
                front where there are fewer.
            inputs: what `Strategy.inputs` asks for.
        """
        ...

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStep:
        """Choose a token for each sequence.

        Args:
            logits: float32 (sequences, part of the vocabulary), those of this replica.
            position: int32 scalar, of the chosen token, from 0.
        """
        ...

    def unfinished(self, state: list[Tensor]) -> Tensor:
        """Which prompts need more tokens, bool (prompts,)."""
        ...

    def tokens(self, state: list[Tensor]) -> Tensor:
        """The result: int32 (prompts, length), tokens up to and including the end, then padding."""
        ...


class DecodingStrategy(Protocol):
    """How to search: plain data, from which a program makes its search."""

    @property
    def sequences(self) -> int:
        """Sequences decoded for each prompt."""
        ...

    @property
    def processors(self) -> LogitsProcessors:
        """What holds for the choice of tokens."""
        ...

    def inputs(self, prompts: int, length: int) -> Mapping[str, TensorSpec]:
        """Inputs of the search for a micro-batch, by name; their first axis is the prompts'."""
        ...

    def input_arrays(self, prompts: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        """Data of these inputs for some prompts.

        Args:
            prompts: int (n,), their numbers among all prompts, which make a result independent of
                how prompts are shared out. -1: none.
        """
        ...

    def search(self, context: SearchContext) -> Search:
        """The search, in the current Ir."""
        ...
