"""The heads of an attention layer, cut over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from config.sections import RunConfig
from machine.devices import platform
from modelling.layers.attention import Attention, heads_first, merge_heads, split_heads
from modelling.layers.attention_step import PLAIN, Scores
from modelling.layers.axes import Axes
from modelling.layers.dropout import Dropout
from modelling.layers.layer import Layer
from modelling.layers.linear import Linear
from modelling.layers.parallel import Groups
from popxl import Tensor


def fused_attention(config: RunConfig) -> bool | None:
    """What a configuration asks of `popxl.ops.attention`."""
    choice = config.execution.attention
    if choice != "auto":
        return choice == "fused"
    return True if platform(config) == "gpu" else None


class AttentionHeads(Layer):
    """The common part of attention layers: this replica's heads, and the output projection.

    Subclasses project to queries, keys and values. All of it is inside a sharded computation.

    Variables: `output.weight` (heads * head_size / tensor_parallel, hidden); `sinks` (heads /
    tensor_parallel,), if the scores have some.

    Attributes:
        heads, key_heads: heads of queries, and of keys and values, on this replica.
        holders: neighbours of a tensor-parallel group that hold the same heads of keys and values,
            see `Groups.holders`.
        window, has_sinks: see `Scores`.
        fused: see `popxl.ops.attention`.

    Args:
        heads: of the whole layer.
        head_size: features of a head.
        scores, slices: see `Attention`.
        key_heads: heads of keys and values, each for equally many of queries; None: as `heads`.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        heads: int,
        head_size: int,
        scores: Scores = PLAIN,
        slices: int = 1,
        key_heads: int | None = None,
    ) -> None:
        super().__init__()
        model = config.model
        self.groups = groups
        self.axes = Axes.of(config)
        self.heads = groups.shard(heads, "attention heads")
        self.features = self.heads * head_size  # of all heads on a replica
        self.holders = groups.holders(key_heads or heads)
        self.key_heads = (key_heads or heads) * self.holders // groups.tensor_parallel
        self.dropout = Dropout.of(model)
        self.fused = fused_attention(config) if slices == 1 else False
        self.window, self.has_sinks = scores.window, scores.sinks
        self.attention = Attention(
            self.dropout, scores, slices, differentiable=not model.eval, fused=self.fused
        )
        self.few_bits = model.few_bits_in_layers
        self.output = Linear(model.hidden_size, groups.sharded, few_bits=self.few_bits)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor] = (),
        seed: Tensor | None = None,
        places: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attention of this replica's heads; see `Attention.build`."""
        if self.has_sinks:
            sinks = self.weight("sinks", (self.heads,), q.dtype, self.groups.sharded)
            biases = [*biases, sinks]
        return self.attention(q, k, v, biases, self.groups.own_seed(seed), places, lengths)

    def of_heads(self, projection: Tensor, heads: int | None = None) -> Tensor:
        """(batch, n, heads * head_size) -> (batch, n, heads, head_size). Default: `self.heads`."""
        return split_heads(self.axes.swap(projection), heads or self.heads)

    def split(self, *projections: Tensor) -> tuple[Tensor, ...]:
        """Each (batch, n, heads * head_size) -> (batch, heads, n, head_size)."""
        return tuple(heads_first(self.of_heads(t)) for t in projections)

    def merge(self, heads: Tensor) -> Tensor:
        """What `attend` returns -> this replica's part of the sum, (batch, queries, hidden)."""
        return self.output(self.axes.swap(merge_heads(heads)))
