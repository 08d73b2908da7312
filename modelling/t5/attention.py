"""T5's attention layers: norm, attention, residual.

Each is three steps, so that generation can put key/value caches between them: project, attend,
project out. `build` runs them one after the other.
"""

from __future__ import annotations

import popxl
from config.t5 import T5Config
from modelling.layers import (
    AttentionHeads,
    FusedLinear,
    Groups,
    Linear,
    RMSNorm,
    add_residual,
)
from modelling.t5.packing import Packing
from modelling.t5.relative_position import RelativePosition
from popxl import Tensor


class AttentionLayer(AttentionHeads):
    """What self-attention and cross-attention have in common.

    Args:
        slices: see `Attention`.
    """

    def __init__(self, config: T5Config, groups: Groups, slices: int = 1) -> None:
        attention = config.model.attention
        super().__init__(config, groups, attention.heads, attention.d_kv, slices=slices)
        self.norm = RMSNorm(config.model.layer_norm_epsilon)
        self.packing = Packing.of(config)

    @property
    def takes_lengths(self) -> bool:
        """Whether padding is told as numbers of tokens: a kernel adds one bias, not two."""
        return bool(self.fused) and self.packing.examples == 1

    def project_out(self, x: Tensor, heads: Tensor, seed: Tensor | None = None) -> Tensor:
        """Add the heads' results to the residual.

        Args:
            x: the layer's input, (batch, queries, hidden).
            heads: what `attend` returns.
        """
        y = self.groups.reduce_from_tp(self.merge(heads))
        return add_residual(x, self.dropout(y, seed))


class SelfAttention(AttentionLayer):
    """x + attention(norm(x)), with relative positions.

    Variables: `norm.weight`, `qkv.weight` (hidden, 3 * features on a replica),
    `relative_position.weight`, `output.weight`.

    Args:
        causal: whether positions see only themselves and those before.
    """

    def __init__(self, config: T5Config, groups: Groups, causal: bool, slices: int = 1) -> None:
        super().__init__(config, groups, slices)
        dtype = popxl.dtype.as_dtype(config.model.precision)
        self.qkv = FusedLinear(self.features, 3, groups.sharded, self.group_size)
        self.relative_position = RelativePosition(config.model.attention, dtype, causal, groups)

    def build(self, x: Tensor, mask: Tensor | None = None, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask: int32 (batch, length), see `Packing`; default: nothing is hidden.
        """
        attention_seed, output_seed = self.dropout.seeds(seed, 2)
        q, k, v = self.project_qkv(x)
        length = self.axes.length(x)
        biases, lengths = [self.relative_position(length, length)], None
        if mask is not None and self.takes_lengths:
            lengths = self.packing.lengths(mask)
        elif mask is not None:
            biases.append(self.packing.encoder_bias(mask))
        heads = self.attend(q, k, v, biases, attention_seed, lengths=lengths)
        return self.project_out(x, heads, output_seed)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of x, each (batch, heads, length, d_kv)."""
        return self.split(*self.qkv(self.groups.copy_to_tp(self.norm(x))))


class CrossAttention(AttentionLayer):
    """x + attention(norm(x), encoded), without position biases.

    Variables: `norm.weight`, `q.weight`, `kv.weight` (hidden, 2 * features on a replica),
    `output.weight`.
    """

    def __init__(self, config: T5Config, groups: Groups) -> None:
        super().__init__(config, groups)
        self.q = Linear(self.features, groups.sharded, group_size=self.group_size)
        self.kv = FusedLinear(self.features, 2, groups.sharded, self.group_size)

    def build(self, x: Tensor, encoded: Tensor, mask: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch * examples of a sample, length, hidden) -> the same shape.

        Args:
            encoded: the encoder's output, (batch, encoder length, hidden).
            mask: int32 (batch, encoder length), see `Packing`.
        """
        attention_seed, output_seed = self.dropout.seeds(seed, 2)
        biases, lengths = [], None
        if self.takes_lengths:
            lengths = self.packing.lengths(mask)
        else:
            biases.append(self.packing.cross_bias(mask, self.axes.length(x)))
        x = self.packing.together(x)
        q = self.project_q(x)
        k, v = self.project_kv(encoded)
        heads = self.attend(q, k, v, biases, attention_seed, lengths=lengths)
        return self.packing.apart(self.project_out(x, heads, output_seed))

    def project_q(self, x: Tensor) -> Tensor:
        """Queries of x, (batch, heads, length, d_kv)."""
        return self.split(self.q(self.groups.copy_to_tp(self.norm(x))))[0]

    def project_kv(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the encoder's output, each (batch, heads, encoder length, d_kv)."""
        return self.split(*self.kv(self.groups.copy_to_tp(encoded)))
