"""The layer of Llama-shaped models: attention, then a gated feed-forward."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.layers import (
    NO_SEEDS,
    DecoderLayer,
    GatedFeedForward,
    Map,
    RMSNorm,
    Seeds,
    add_residual,
)
from modelling.llama.attention import SelfAttention
from popxl import Tensor

BRANCHES = ("attention", "feed_forward")


class Block(DecoderLayer):
    """x + branch(x) for both branches, of which each has a norm before it, after it, or both.

    Variables: those of `attention` and `feed_forward`; `attention_norm.weight` and
    `feed_forward_norm.weight` of norms before the branches, `attention_end_norm.weight` and
    `feed_forward_end_norm.weight` of those after them; `attention_bias` and `feed_forward_bias`
    (hidden,), where the branches end with one.

    Args:
        kind: of the layer, see `config.llama`.
        room: positions after the sequence, in generation.
    """

    def __init__(self, config: LlamaConfig, kind: str, room: int = 0) -> None:
        super().__init__(config)
        self.model = model = config.model
        for branch in BRANCHES:
            if model.norms != "after":
                setattr(self, f"{branch}_norm", self._norm())
            if model.norms != "before":
                setattr(self, f"{branch}_end_norm", self._norm())
        self.attention = SelfAttention(config, self.groups, kind, room)
        self.feed_forward = GatedFeedForward(
            model.hidden_size,
            model.inner_size,
            self.groups,
            model.weight_group_size,
            model.activation,
            model.feed_forward_bias,
        )

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.model.norm_epsilon, self.model.norms_from_one)

    def around(self, x: Tensor, attend: Map, seeds: Seeds = NO_SEEDS) -> Tensor:
        """See `DecoderLayer`."""
        biases = self.model.attention.output_bias, self.model.feed_forward_bias
        parts: tuple[Map, Map] = (attend, self.feed_forward)
        for branch, part, bias, seed in zip(BRANCHES, parts, biases, seeds, strict=True):
            x = self._add(x, branch, part, bias, seed)
        return x

    def _add(self, x: Tensor, branch: str, part: Map, bias: bool, seed: Tensor | None) -> Tensor:
        """Add a branch to x."""
        before, after = (getattr(self, f"{branch}{n}_norm", None) for n in ("", "_end"))
        y = x if before is None else before(x)
        y = self.groups.reduce_from_tp(part(self.groups.copy_to_tp(y)))
        if bias:
            y = y + self.weight(f"{branch}_bias", x.shape[-1:], x.dtype)
        y = self.dropout(y if after is None else after(y), seed)
        return add_residual(
            x, y if self.model.residual_scale == 1 else y * self.model.residual_scale
        )
