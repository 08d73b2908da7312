"""The heads of an attention layer, sharded over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from config.sections import RunConfig
from modelling.devices import platform
from modelling.layers.attention import (
    Attention,
    AttentionSpec,
    merge_heads,
    split_heads,
    transpose_heads,
)
from modelling.layers.context import BlockContext
from modelling.layers.dropout import Dropout
from modelling.layers.module import Module
from popxl import Tensor


def choose_fused_attention(config: RunConfig) -> bool | None:
    """Return what a configuration asks of `popxl.ops.attention`."""
    choice = config.execution.attention
    if choice != "auto":
        return choice == "fused"
    return True if platform(config) == "gpu" else None


class MultiHeadAttention(Module):
    """Attention between the projections, which subclasses declare. It is inside a tensor-parallel
    computation.

    Shapes: b samples, n tokens, h heads on this replica, g of them with keys of their own, d
    features of a head.

    Args:
        heads: of the whole layer.
        scores: how scores are made.
        kv_heads: heads of keys and values, each for equally many of queries; None: as `heads`.
        is_sliced: whether `execution.attention_serialisation` is for it.
        dropout: of the probabilities; None: the model's.

    Attributes:
        heads, kv_heads: h and g.
        fused: see `popxl.ops.attention`.
    """

    def __init__(
        self,
        heads: int,
        scores: AttentionSpec,
        kv_heads: int | None = None,
        is_sliced: bool = False,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__()
        config, kv_heads = self.config, kv_heads or heads
        slices = config.execution.attention_slices if is_sliced else 1
        parts = config.execution.tensor_parallel
        self.heads, self.kv_heads = heads // parts, max(kv_heads // parts, 1)
        self.fused = choose_fused_attention(config) if slices == 1 else False
        self.window = scores.window
        self.attention = Attention(
            Dropout.from_model(config.model) if dropout is None else dropout,
            scores,
            slices,
            differentiable=not config.model.eval,
            fused=self.fused,
        )

    def split_heads(self, x: Tensor) -> Tensor:
        """Queries (b, n, h * d) -> (b, n, h, d)."""
        return split_heads(self.layout.convert(x), self.heads)

    def split_kv_heads(self, x: Tensor) -> Tensor:
        """Keys or values (b, n, g * d) -> (b, n, g, d)."""
        return split_heads(self.layout.convert(x), self.kv_heads)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: BlockContext,
        biases: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend from queries (b, n, h, d) to keys and values (b, n, g, d) -> (b, n, h * d).

        Args:
            biases, lengths: see `Attention.build`.
        """
        q, k, v = transpose_heads(q), transpose_heads(k), transpose_heads(v)
        k, v = ctx.update_cache(k, v, self.window)
        return self.attend_heads(q, k, v, ctx, biases, ctx.qk_ids(self.window), lengths)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: BlockContext,
        biases: Sequence[Tensor] = (),
        positions: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Like `attend`, of (b, h, n, d) and (b, g, n, d), to keys and values that are at hand."""
        seed = self.groups.tp_seed(ctx.next_seed())
        y = self.attention(q, k, v, biases, seed, positions, lengths)
        return self.layout.convert(merge_heads(y))
