"""AdamW whose moments take 8 bits."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ReplicaGrouping, ops
from popxl.custom import jax_op
from popxl_addons.optimizers import packed
from popxl_addons.optimizers._common import Number, wide
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.sharding import shards_of

__all__ = ["PackedAdamOptimizerStep"]

_NO_GRAD = "optimizer state is not differentiated"
_pack_first = jax_op(name="pack_first_moment", no_grad=_NO_GRAD)(
    lambda moment, *, groups: packed.pack_first(moment, groups)
)
_unpack_first = jax_op(name="unpack_first_moment", no_grad=_NO_GRAD)(
    lambda codes, scales, *, groups: packed.unpack_first(codes, scales, groups)
)
_pack_second = jax_op(name="pack_second_moment", no_grad=_NO_GRAD)(
    lambda moment, *, groups: packed.pack_second(moment, groups)
)
_unpack_second = jax_op(name="unpack_second_moment", no_grad=_NO_GRAD)(
    lambda codes, scales, *, groups: packed.unpack_second(codes, scales, groups)
)


class PackedAdamOptimizerStep(AdamOptimizerStep):
    """`AdamOptimizerStep` with moments in 8 bits (FlashOptim, arXiv:2602.23349), see `packed`.

    Variables: `first_order_codes` (int8) and `second_order_codes` (uint8), of the shape of the
    variable, `first_order_scales` and `second_order_scales` (bfloat16), for each 32 neighbours
    along `axis` one, and `step`. What is kept is expanded, updated in float32 and packed again.

    Args:
        cache: reuse the graph for variables of the same shape and the same settings.
    """

    def build(  # type: ignore[override]
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        *,
        axis: int,
        **settings: Any,
    ) -> None:
        """Update `var` and the state; see `AdamOptimizerStep.build`.

        Args:
            axis: of the whole variable, along which neighbours share a scale.

        Raises:
            ValueError: besides what it says there, the variable has no such axis, or a replica's
                part of it cuts a group.
        """
        shape = tuple(var.meta_shape or var.shape)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"PackedAdamOptimizerStep: {var.id!r} of shape {shape} has no axis {axis}"
            )
        self._axis = axis % len(shape)
        super().build(var, grad, replica_grouping, **settings)

    def _averages(
        self,
        var: popxl.Tensor,
        gradient: popxl.Tensor,
        group: ReplicaGrouping | None,
        beta1: Number,
        beta2: Number,
        dtypes: tuple[popxl.dtype, popxl.dtype],
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        groups = self._groups(var, group)
        first = self._state("first_order", popxl.int8, var, group)
        second = self._state("second_order", popxl.uint8, var, group)
        old_mean = _unpack_first(*first, groups=groups)
        old_square = _unpack_second(*second, groups=groups)
        mean = _moved(old_mean, gradient, beta1)
        square = _moved(old_square, gradient * gradient, beta2)
        for state, new in (
            (first, _pack_first(mean, groups=groups)),
            (second, _pack_second(square, groups=groups)),
        ):
            for variable, value in zip(state, new, strict=True):
                ops.var_updates.copy_var_update_(variable, value.reshape(variable.shape))
        return mean, square

    def _groups(self, var: popxl.Tensor, group: ReplicaGrouping | None) -> packed.Groups:
        whole = popxl.gcg().ir.replica_grouping() if group is None else group
        shape = tuple(var.meta_shape or var.shape)
        shards = shards_of(var.spec, whole.group_size)
        groups = packed.Groups.along(self._axis, shape, shards)
        if groups is None:
            raise ValueError(
                f"{shards} parts of {var.id!r}, {list(shape)}, cut groups of {packed.GROUP} along "
                f"axis {self._axis}: keep it whole"
            )
        return groups

    def _state(
        self, name: str, dtype: popxl.dtype, var: popxl.Tensor, group: ReplicaGrouping | None
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        """The codes of a moment, and their scales."""
        scales = packed.scales_shape(tuple(var.meta_shape or var.shape), self._axis)
        return (
            self.state_like(f"{name}_codes", var, dtype, group),
            self.state_like(f"{name}_scales", var, popxl.bfloat16, group, scales),
        )


def _moved(average: popxl.Tensor, value: popxl.Tensor, beta: Number) -> popxl.Tensor:
    """A moving average after one more value."""
    keep = wide(beta) if isinstance(beta, popxl.Tensor) else beta
    return average * keep + value * (1 - keep)
