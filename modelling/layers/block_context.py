"""Residual connections, and the inputs besides x of a block that runs on full samples.

Generation has contexts of its own (`modelling.generation.attention_contexts`), for prompts and for
one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

import popxl
from modelling.layers.activation_layout import ActivationLayout
from modelling.layers.attention import packed_qk_ids
from modelling.layers.dropout import Dropout
from modelling.layers.run_config import current_run_config
from popxl import Tensor, ops

if TYPE_CHECKING:
    from modelling.layers.rotary import RopeTables


FLOAT16_LIMIT = float(np.finfo(np.float16).max) - 1000


def add_residual(x: Tensor, y: Tensor) -> Tensor:
    """Returns x + y; in float16 clipped to that dtype's finite range.

    A few activations of models trained in bfloat16, especially T5, exceed that range. One infinity
    would turn everything after it into NaN; clipping does no harm (Hugging Face clips too). The
    gradient is not clipped, see `saturate`.
    """
    total = x + y
    if total.dtype != popxl.float16:
        return total
    from popxl_addons.ops import saturate

    return saturate(total, limit=FLOAT16_LIMIT)


class BlockContext:
    """Seeds, positions, masks and expert usage of one call of one transformer block.

    Args:
        segment_starts: int32 (batch, length), the index in its sample at which each token's
            sequence starts; None: a sample is one sequence.
        seed: uint32 (2,) for dropout, equal on the replicas of a tensor-parallel group.
        expert_usage: float32 (2, experts), summed over the earlier blocks, see
            `count_expert_usage`; None: not counted.
        segment_ids: int32 (batch, length), 0 for padding, which does not count as usage.
        routes_only: True if the experts run in phases of their own, see `defer_experts`.

    Attributes:
        expert_usage: with this block's usage.
        expert_inputs: inputs of the experts' phases, by name.
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
        self._dropout = Dropout.from_model_config(config.model)
        self._has_dropout = config.model.has_dropout and not config.model.eval
        self._segment_starts, self._seed, self._num_seeds = segment_starts, seed, 0
        self._segment_ids, self.expert_usage = segment_ids, expert_usage
        self.routes_only, self.expert_inputs = routes_only, dict[str, Tensor]()
        self.max_length = config.model.sequence_length

    # ---- dropout and residuals ------------------------------------------------------------------
    def next_seed(self) -> Tensor | None:
        """Derives a new seed, uint32 (2,), from the block's seed; None without dropout."""
        if not self._has_dropout or self._seed is None:
            return None
        self._num_seeds += 1
        return ops.create_random_seed(self._seed, popxl.constant(self._num_seeds, popxl.uint32))

    def dropout(self, x: Tensor) -> Tensor:
        """Applies the model's dropout with a new seed: any shape -> the same shape."""
        return self._dropout(x, self.next_seed())

    def add_residual(self, x: Tensor, y: Tensor | None, multiplier: float = 1.0) -> Tensor:
        """Returns x + dropout(y) * multiplier, all of one shape; x if y is None."""
        if y is None:
            return x
        y = self.dropout(y)
        return add_residual(x, y if multiplier == 1 else y * multiplier)

    # ---- positions, and keys and values of other tokens -----------------------------------------
    def rope_tables(self, make_tables: Callable[[int], RopeTables], length: int) -> RopeTables:
        """Returns the RoPE tables of the tokens' positions.

        Args:
            make_tables: returns the tables of positions 0, 1, ..., for a number of positions.
            length: tokens of a sample.
        """
        from modelling.layers.rotary import packed_rope_tables  # not all families have rotations

        return packed_rope_tables(make_tables(length), self._segment_starts)

    def qk_ids(self, window: int | None) -> Sequence[Tensor]:
        """Returns position ids and segment ids of queries and keys, see `Attention.build`.

        Args:
            window: the layer's sliding window.
        """
        return () if self._segment_starts is None else packed_qk_ids(self._segment_starts)

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Appends new keys and values to the cached ones; returns all that the queries attend to.

        Here there are no earlier tokens: it returns k and v.

        Args:
            k, v: (batch, heads, tokens, head_dim).
            window: the layer's sliding window.
        """
        return k, v

    # ---- experts --------------------------------------------------------------------------------
    def count_experts(self, topk_experts: Tensor, probabilities: Tensor) -> None:
        """Adds this block's expert usage to the total; arguments as for `count_expert_usage`."""
        if self.expert_usage is not None:
            from popxl_addons.ops.routing import count_expert_usage

            assert self._segment_ids is not None
            token_mask = self._layout.transpose_if_sequence_first(self._segment_ids)
            usage = count_expert_usage(topk_experts, probabilities, token_mask)
            self.expert_usage = self.expert_usage + usage

    def defer_experts(self, **inputs: Tensor) -> None:
        """Saves the inputs of the expert layer; its experts then run in phases of their own."""
        self.expert_inputs = inputs
