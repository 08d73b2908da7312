"""Token embedding, with the vocabulary sharded over tensor parallelism."""

from __future__ import annotations

import popxl
from modelling.layers.dropout import Dropout
from modelling.layers.lora import TrainableTokenRows, VocabularyAdapter
from modelling.layers.module import Module, cast_if_needed, parameter
from popxl import Tensor, ops


class VocabularyEmbedding(Module):
    """Token embedding with the vocabulary sharded over tensor parallelism.

    Each replica looks up the tokens of its shard; the sum over the group is the embedding. Rows of
    some tokens may be trained separately, and it may have an adapter.

    Args:
        std: of the initial weights.
        is_shared: True if another module owns the weight: then it is that of a tied head.
        vocab_size, hidden_size: numbers of rows and features; None: the model's.

    Attributes:
        last_weights: the result of the last call of `embedding_weights`.
    """

    last_weights: list[Tensor] | None = None
    adapters: VocabularyAdapter | None = None

    def __init__(
        self,
        std: float,
        hf_name: str,
        is_shared: bool = False,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__(hf_name)
        model, self.is_shared = self.config.model, is_shared
        tokens = self.config.trained_tokens
        self.rows = TrainableTokenRows(tokens) if tokens else None
        rows, hidden = vocab_size or model.vocab_size, hidden_size or model.hidden_size
        self.weight = parameter(rows, hidden, std=std, shard=0)

    def build(self, input_ids: Tensor) -> Tensor:
        """Looks up embeddings: int32 of any shape, in [0, vocab_size) -> (*shape, hidden)."""
        (weight, *lora), groups = self.embedding_weights(), self.groups
        is_sharded = groups.tensor_parallel > 1
        local_ids = input_ids
        if is_sharded:
            local_ids = input_ids - groups.tp_rank() * weight.shape[0]
        x = ops.gather(weight, local_ids, zero_OOR=is_sharded)
        if lora:
            a, b = lora
            delta = ops.gather(a, local_ids, zero_OOR=is_sharded) @ b
            x = cast_if_needed(cast_if_needed(x, popxl.float32) + delta, x.dtype)
        return groups.reduce_from_tp(x)

    def embedding_weights(self) -> list[Tensor]:
        """Returns the embedding weight, (local vocab size, hidden), and its adapter.

        The adapter: A, (local vocab size, rank), and B, (rank, hidden).
        """
        weight = self.weight if self.rows is None else self.rows(self.weight)
        self.last_weights = [weight, *(self.adapters() if self.adapters else [])]
        return self.last_weights


class Embeddings(Module):
    """The input layer of an encoder or decoder: dropout(tokens(input_ids) * scale).

    Args:
        tokens: the token embedding.
        scale: factor on it, rounded to its dtype.

    Attributes:
        has_positions: True if `build` of a subclass also takes `positions`, int32 (batch or 1,
            length), counted within each sequence; None: 0, 1, ...
    """

    has_positions = False

    def __init__(self, tokens: VocabularyEmbedding, scale: float = 1.0) -> None:
        super().__init__()
        self.dropout = Dropout.from_model_config(self.config.model)
        self.tokens, self.scale = tokens, scale

    def build(self, input_ids: Tensor, seed: Tensor | None = None) -> Tensor:
        """Embeds tokens: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, equal on the replicas of a tensor-parallel group.
        """
        x = self.tokens(self.layout.transpose_if_sequence_first(input_ids))
        return self.dropout(x if self.scale == 1 else x * self.scale, seed)
