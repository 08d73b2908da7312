"""Embedding of tokens, with the vocabulary cut over tensor parallelism."""

from __future__ import annotations

import popxl
from config.sections import RunConfig
from modelling.layers.axes import Axes
from modelling.layers.dropout import Dropout
from modelling.layers.layer import Layer
from modelling.layers.parallel import Groups
from popxl import Tensor, ops


class VocabularyEmbedding(Layer):
    """Rows of a table whose parts are on the replicas of a tensor-parallel group.

    Each replica looks up the tokens in its part; the sum over the group is the embedding.

    Variables: `weight` (ceil(vocabulary / tensor_parallel), hidden), sharded.
    """

    def __init__(self, vocabulary: int, hidden: int, dtype: popxl.dtype, groups: Groups) -> None:
        """Args: `dtype`: of the weight and the output."""
        super().__init__()
        self.shape = (groups.vocabulary_shard(vocabulary), hidden)
        self.dtype = dtype
        self.groups = groups

    def build(self, tokens: Tensor) -> Tensor:
        """tokens: int32 of any shape, in [0, vocabulary) -> (*shape, hidden)."""
        weight = self.weight("weight", self.shape, self.dtype, self.groups.sharded)
        if self.groups.tensor_parallel == 1:
            return ops.gather(weight, tokens)
        own = tokens - self.groups.rank() * self.shape[0]
        return self.groups.close_sharded(ops.gather(weight, own, zero_OOR=True))


class Embeddings(Layer):
    """What a stack begins with: embeddings of tokens, and dropout.

    Variables: `tokens.weight`, see `VocabularyEmbedding`.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model = config.model
        self.axes = Axes.of(config)
        self.dropout = Dropout.of(model)
        self.tokens = VocabularyEmbedding(
            model.embedding.vocab_size,
            model.hidden_size,
            popxl.dtype.as_dtype(model.precision),
            Groups.current(config.execution.tensor_parallel),
        )

    def build(self, words: Tensor, seed: Tensor | None = None) -> Tensor:
        """words: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        return self.dropout(self.tokens(self.axes.swap(words)), seed)
