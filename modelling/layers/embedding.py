"""Embedding of tokens, with the vocabulary sharded over tensor parallelism."""

from __future__ import annotations

import popxl
from modelling.layers.dropout import Dropout
from modelling.layers.lora import TrainableTokenRows, VocabularyAdapter
from modelling.layers.module import Module, cast, parameter
from popxl import Tensor, ops


class VocabularyEmbedding(Module):
    """Rows of a table whose shards are on the replicas of a tensor-parallel group.

    Each replica looks up the tokens in its shard; the sum over the group is the embedding. Some
    rows may be trained beside the others (`rows`), and it may be given an adapter.

    Args:
        std: of the initial weights.
        is_shared: whether another module owns the table, such as that of a tied head.

    Attributes:
        made: what `embedding_weights` returned last.
    """

    last_weights: list[Tensor] | None = None
    adapters: VocabularyAdapter | None = None

    def __init__(self, std: float, hf_name: str, is_shared: bool = False) -> None:
        super().__init__(hf_name)
        model, self.is_shared = self.config.model, is_shared
        tokens = self.config.trained_tokens
        self.rows = TrainableTokenRows(tokens) if tokens else None
        self.weight = parameter(model.vocab_size, model.hidden_size, std=std, shard=0)

    def build(self, tokens: Tensor) -> Tensor:
        """tokens: int32 of any shape, in [0, vocabulary) -> (*shape, hidden)."""
        (weight, *low_rank), groups = self.embedding_weights(), self.groups
        is_sharded = groups.tensor_parallel > 1
        own = tokens - groups.tp_rank() * weight.shape[0] if is_sharded else tokens
        x = ops.gather(weight, own, zero_OOR=is_sharded)
        if low_rank:
            a, b = low_rank
            more = ops.gather(a, own, zero_OOR=is_sharded) @ b
            x = cast(cast(x, popxl.float32) + more, x.dtype)
        return groups.reduce_from_tp(x)

    def embedding_weights(self) -> list[Tensor]:
        """The weight, (vocabulary on a replica, hidden), with the rows trained beside it, and A and
        B of an adapter."""
        weight = self.weight if self.rows is None else self.rows(self.weight)
        self.last_weights = [weight, *(self.adapters() if self.adapters else [])]
        return self.last_weights


class Embeddings(Module):
    """The beginning of a stack: embeddings of tokens, times a factor, and dropout.

    Args:
        tokens: their embedding.
        scale: the factor, rounded to the embedding's type.

    Attributes:
        has_positions: whether `build` of a subclass takes `positions` besides the words, int32
            (batch or 1, length), in their texts; None: 0, 1, ...
    """

    has_positions = False

    def __init__(self, tokens: VocabularyEmbedding, scale: float = 1.0) -> None:
        super().__init__()
        self.dropout = Dropout.from_model(self.config.model)
        self.tokens, self.scale = tokens, scale

    def build(self, input_ids: Tensor, seed: Tensor | None = None) -> Tensor:
        """input_ids: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        x = self.tokens(self.layout.convert(input_ids))
        return self.dropout(x if self.scale == 1 else x * self.scale, seed)
