"""Embedding of tokens, with the vocabulary cut over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from config.sections import RunConfig
from modelling.layers.axes import Axes
from modelling.layers.dropout import Dropout
from modelling.layers.layer import Layer, cast
from modelling.layers.low_rank_vocabulary import VocabularyAdapter
from modelling.layers.parallel import Groups
from modelling.layers.token_rows import TokenRows
from popxl import Tensor, ops


class VocabularyEmbedding(Layer):
    """Rows of a table whose parts are on the replicas of a tensor-parallel group.

    Each replica looks up the tokens in its part; the sum over the group is the embedding.

    Variables: `weight` (ceil(vocabulary / tensor_parallel), hidden), sharded; those of `rows`, if
    some tokens' are trained beside it, and of `adapters`, if it is given some (`adapt`).

    Attributes:
        made: what `table` returned last.
    """

    made: list[Tensor] | None = None
    adapters: VocabularyAdapter | None = None

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        dtype: popxl.dtype,
        groups: Groups,
        trained: Sequence[int] = (),
    ) -> None:
        """
        Args:
            dtype: of the weight and the output.
            trained: tokens whose rows are trained beside the others.
        """
        super().__init__()
        self.rows = TokenRows(trained, groups) if trained else None
        self.shape = (groups.vocabulary_shard(vocabulary), hidden)
        self.dtype = dtype
        self.groups = groups

    def build(self, tokens: Tensor) -> Tensor:
        """tokens: int32 of any shape, in [0, vocabulary) -> (*shape, hidden)."""
        weight, *low_rank = self.table()
        is_cut = self.groups.tensor_parallel > 1
        own = tokens - self.groups.rank() * self.shape[0] if is_cut else tokens
        x = ops.gather(weight, own, zero_OOR=is_cut)
        if low_rank:
            a, b = low_rank
            more = ops.gather(a, own, zero_OOR=is_cut) @ b
            x = cast(cast(x, popxl.float32) + more, x.dtype)
        return self.groups.reduce_from_tp(x)

    @classmethod
    def of(cls, config: RunConfig) -> VocabularyEmbedding:
        """The embedding of a configured model."""
        return cls(
            config.model.embedding.vocab_size,
            config.model.hidden_size,
            popxl.dtype.as_dtype(config.model.precision),
            Groups.current(config.execution.tensor_parallel),
            config.trained_tokens,
        )

    def table(self) -> list[Tensor]:
        """The weight, with the rows that are trained beside it, and A and B of an adapter."""
        weight = self.weight("weight", self.shape, self.dtype, self.groups.sharded)
        weight = weight if self.rows is None else self.rows(weight)
        self.made = [weight, *(self.adapters.matrices(weight) if self.adapters else [])]
        return self.made


class Embeddings(Layer):
    """The beginning of a stack: embeddings of tokens, times a factor, and dropout.

    Variables: `tokens.weight`, see `VocabularyEmbedding`.

    Args:
        scale: the factor, rounded to the embedding's type.
    """

    def __init__(self, config: RunConfig, scale: float = 1.0) -> None:
        super().__init__()
        self.axes = Axes.of(config)
        self.dropout = Dropout.of(config.model)
        self.tokens = VocabularyEmbedding.of(config)
        self.scale = scale

    def build(self, words: Tensor, seed: Tensor | None = None) -> Tensor:
        """words: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        x = self.tokens(self.axes.swap(words))
        return self.dropout(x if self.scale == 1 else x * self.scale, seed)
