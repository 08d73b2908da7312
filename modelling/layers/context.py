"""Inputs of a block besides x, for whole samples in training.

Generation has contexts of its own for prompts and for a token:
`modelling.generation.attention_contexts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import popxl
from modelling.layers.attention import packed_qk_ids
from modelling.layers.axes import ActivationLayout
from modelling.layers.dropout import Dropout
from modelling.layers.residual import add_residual
from modelling.layers.rotary import RopeTables, packed_rope_tables
from modelling.layers.run_config import current_run_config
from popxl import Tensor, ops
from popxl_addons.ops.routing import count_expert_usage


class BlockContext:
    """The context of whole samples, for one call of one block.

    Args:
        starts: int32 (batch, length), where in its sample each token's text starts; None: a sample
            is one text.
        seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        usage: of experts before the block, see `count_expert_usage`; None: it is not counted.
        segments: int32 (batch, length), 0 where a token is padding, which does not count.
        routes_only: whether experts are phases of their own, see `defer_experts`.

    Attributes:
        usage: of experts, with the block's.
        handed_on: what experts read that are phases of their own, by name.
    """

    def __init__(
        self,
        segment_starts: Tensor | None = None,
        seed: Tensor | None = None,
        expert_usage: Tensor | None = None,
        segment_ids: Tensor | None = None,
        routes_only: bool = False,
    ) -> None:
        config = current_run_config()
        self._layout = ActivationLayout.from_config(config)
        self._dropout = Dropout.from_model(config.model)
        self._drops = config.model.drops and not config.model.eval
        self._segment_starts, self._seed, self._seeds_drawn = segment_starts, seed, 0
        self._segment_ids, self.expert_usage = segment_ids, expert_usage
        self.routes_only, self.expert_inputs = routes_only, dict[str, Tensor]()
        self.max_length = config.model.sequence_length

    # ---- dropout and residuals ------------------------------------------------------------------
    def next_seed(self) -> Tensor | None:
        """A new seed made from the block's; None: nothing is random."""
        if not self._drops or self._seed is None:
            return None
        self._seeds_drawn += 1
        return ops.create_random_seed(self._seed, popxl.constant(self._seeds_drawn, popxl.uint32))

    def dropout(self, x: Tensor) -> Tensor:
        """Zero elements of `x` and scale up the others, with a new seed."""
        return self._dropout(x, self.next_seed())

    def add_residual(self, x: Tensor, y: Tensor | None, multiplier: float = 1.0) -> Tensor:
        """x + dropout(y) * multiplier, see `add_residual`; None: x."""
        if y is None:
            return x
        y = self.dropout(y)
        return add_residual(x, y if multiplier == 1 else y * multiplier)

    # ---- positions, and keys and values of other tokens -----------------------------------------
    def rope_tables(self, make: Callable[[int], RopeTables], length: int) -> RopeTables:
        """The rotary tables of the positions of tokens.

        Args:
            make: makes the tables of positions 0, 1, ..., so many of them.
            length: tokens of a sample.
        """
        return packed_rope_tables(make(length), self._segment_starts)

    def qk_ids(self, window: int | None) -> Sequence[Tensor]:
        """The places of queries and keys, see `Attention.build`."""
        return () if self._segment_starts is None else packed_qk_ids(self._segment_starts)

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add new keys and values to those of tokens before, and return what queries see: here,
        the new ones alone.

        Args:
            k, v: (batch, heads, tokens, head_dim).
            window: of the layer.
        """
        return k, v

    # ---- experts --------------------------------------------------------------------------------
    def count(self, topk_experts: Tensor, probabilities: Tensor) -> None:
        """Count how experts are used; arguments as for `count_expert_usage`."""
        if self.expert_usage is not None:
            assert self._segment_ids is not None
            is_token = self._layout.convert(self._segment_ids)
            counted = count_expert_usage(topk_experts, probabilities, is_token)
            self.expert_usage = self.expert_usage + counted

    def defer_experts(self, **tensors: Tensor) -> None:
        """Leave the experts to phases of their own, which read these tensors."""
        self.expert_inputs = tensors
