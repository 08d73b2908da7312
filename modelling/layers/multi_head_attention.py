"""Multi-head attention, with heads sharded over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from config.sections import RunConfig
from modelling.devices import resolve_platform
from modelling.layers.attention import (
    Attention,
    AttentionSpec,
    merge_heads,
    split_heads,
    transpose_heads,
)
from modelling.layers.block_context import BlockContext
from modelling.layers.dropout import Dropout
from modelling.layers.module import Module
from popxl import Tensor


def choose_fused_attention(config: RunConfig) -> bool | None:
    """Returns the `fused` argument of `popxl.ops.attention` for a configuration."""
    choice = config.execution.attention
    if choice != "auto":
        return choice == "fused"
    return True if resolve_platform(config) == "gpu" else None


class MultiHeadAttention(Module):
    """Base class of multi-head attention; subclasses declare the projections.

    Shapes: b samples, n tokens, h heads on this replica, g KV heads on this replica, d features of
    a head.

    Args:
        heads: number of heads of the layer, on all replicas.
        spec: how scores are computed.
        kv_heads: number of KV heads; divides `heads`; None: as many as `heads`.
        is_chunked: True if `execution.attention_serialisation` applies.
        dropout: of the probabilities; None: the model's.

    Attributes:
        heads, kv_heads: h and g.
        compares_segments: True for decoder-only models, whose samples have segments.
        window: of causal attention, see `AttentionSpec`; caches keep as many positions.
        fused: see `popxl.ops.attention`.
    """

    def __init__(
        self,
        heads: int,
        spec: AttentionSpec,
        kv_heads: int | None = None,
        is_chunked: bool = False,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__()
        config, kv_heads = self.config, kv_heads or heads
        num_chunks = config.execution.num_query_chunks if is_chunked else 1
        tensor_parallel = config.execution.tensor_parallel
        self.heads = heads // tensor_parallel
        self.kv_heads = max(kv_heads // tensor_parallel, 1)
        self.compares_segments = spec.causal
        if spec.causal and config.training.bidirectional:
            spec = spec.without_causal_mask()
        self.fused = choose_fused_attention(config) if num_chunks == 1 else False
        self.window = None if isinstance(spec.window, tuple) else spec.window
        self.attention = Attention(
            Dropout.from_model_config(config.model) if dropout is None else dropout,
            spec,
            num_chunks,
            differentiable=not config.model.eval,
            fused=self.fused,
        )

    def split_heads(self, x: Tensor) -> Tensor:
        """Splits query features into heads: (b, n, h * d) -> (b, n, h, d)."""
        return split_heads(self.layout.transpose_if_sequence_first(x), self.heads)

    def split_kv_heads(self, x: Tensor) -> Tensor:
        """Splits key or value features into heads: (b, n, g * d) -> (b, n, g, d)."""
        return split_heads(self.layout.transpose_if_sequence_first(x), self.kv_heads)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: BlockContext,
        biases: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attends to new and cached tokens: q (b, n, h, d), k, v (b, n, g, d) -> (b, n, h * d).

        Args:
            ctx: has the keys and values of earlier tokens, and the masks.
            biases, lengths: see `Attention.build`.
        """
        q, k, v = transpose_heads(q), transpose_heads(k), transpose_heads(v)
        k, v = ctx.update_cache(k, v, self.window)
        # Elsewhere biases mask other tokens, such as T5's.
        qk_ids = ctx.qk_ids(self.window) if self.compares_segments else ()
        return self.attend_heads(q, k, v, ctx, biases, qk_ids, lengths)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: BlockContext,
        biases: Sequence[Tensor] = (),
        qk_ids: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attends to the given keys only: q (b, h, n, d), k, v (b, g, m, d) -> (b, n, h * d).

        Args:
            biases, qk_ids, lengths: see `Attention.build`.
        """
        seed = self.groups.tp_seed(ctx.next_seed())
        y = self.attention(q, k, v, biases, seed, qk_ids, lengths)
        return self.layout.transpose_if_sequence_first(merge_heads(y))
