"""Layer, group and batch normalization; statistics are computed in float32 for half types."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating, float_op, upcast_half_types
from popxl.ops._reductions import mean_over, traced_platform
from popxl.tensor import Tensor


def _moments(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the mean and the variance."""
    mean = mean_over(x, axes, keepdims=True)
    centred = x - mean
    return mean, mean_over(centred * centred, axes, keepdims=True)


def _standardise(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    mean, variance = _moments(x, axes)
    return (x - mean) * lax.rsqrt(variance + eps)


def _per_channel(x: Any, parameter: Any, name: str) -> Any:
    """Returns a parameter with one value per channel (axis 1), shaped to broadcast with `x`."""
    check_floating(parameter)
    if x.ndim < 2 or parameter.shape != (x.shape[1],):
        raise ValueError(f"{name} has shape {parameter.shape}, but needs a value for each channel "
                         f"of {x.shape}, axis 1")  # fmt: skip
    return parameter.reshape((-1,) + (1,) * (x.ndim - 2))


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {parameter.shape}, not {x.shape[-1:]}")
        check_floating(parameter)
    return _standardise(x, (-1,), eps) * weight + bias


def _layer_norm_apart(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Returns the layer norm, elsewhere than on CPUs in a kernel of its own.

    XLA for GPUs would otherwise keep kernels apart that read it, such as those that round it.
    """
    y = float_op(_layer_norm)(x, weight, bias, eps=eps)
    return y if traced_platform() in (None, "cpu") else lax.optimization_barrier(y)


def _layer_norm_grads(x: Any, weight: Any, bias: Any, dy: Any, eps: float) -> Any:
    """Returns the gradients of the input, the weight and the bias.

    Elsewhere than on CPUs the statistics are written to memory first: XLA for GPUs would write the
    standardized input, in float32, for the sums over rows.
    """
    if traced_platform() in (None, "cpu"):
        function = partial(float_op(_layer_norm), eps=eps)
        return jax.vjp(function, x, weight, bias)[1](dy)
    wide, grad, scale = (upcast_half_types(t) for t in (x, dy, weight))
    mean, variance = _moments(wide, (-1,))
    mean, inverse = lax.optimization_barrier((mean, lax.rsqrt(variance + eps)))
    standard, scaled = (wide - mean) * inverse, grad * scale
    along = (scaled * standard).mean(-1, keepdims=True)
    dx = inverse * (scaled - scaled.mean(-1, keepdims=True) - standard * along)
    rows = tuple(range(x.ndim - 1))
    dw, db = (grad * standard).sum(rows), grad.sum(rows)
    return dx.astype(x.dtype), dw.astype(weight.dtype), db.astype(bias.dtype)


_LAYER_NORM_GRADS = define("layer_norm_grads", _layer_norm_grads, tags=("reduction",))


def _layer_norm_grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    grads = emit(_LAYER_NORM_GRADS, [*map(ctx.fwd, op.inputs), dy], op.attrs)
    return [g if ctx.needs(op, i) else None for i, g in enumerate(grads)]


_LAYER_NORM = define("layer_norm", _layer_norm_apart, grad=_layer_norm_grad, tags=("reduction",))


def layer_norm(t: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalizes along the last axis to mean 0 and variance 1, then scales and shifts.

    Args:
        t: (..., features).
        weight, bias: (features,), of any float dtype.
        eps: added to the variance.
    """
    return emit(_LAYER_NORM, [t, weight, bias], {"eps": float(eps)})[0]


def _group_norm(x: Any, weight: Any, bias: Any, num_groups: int, eps: float) -> Any:
    if x.ndim < 2 or x.shape[1] % num_groups or not x.size:
        raise ValueError(f"axis 1 of shape {x.shape} cannot be cut into {num_groups} groups")
    grouped = x.reshape((x.shape[0], num_groups, -1))
    flat = _standardise(grouped, (-1,), eps).reshape(x.shape)
    return flat * _per_channel(x, weight, "weight") + _per_channel(x, bias, "bias")


_GROUP_NORM = define("group_norm", float_op(_group_norm))


def group_norm(
    t: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-5
) -> Tensor:
    """Normalizes `num_groups` groups of channels (Wu and He, 2018), then scales and shifts.

    Args:
        t: (batch, channels, ...).
        weight, bias: (channels,), of any float dtype.
        eps: added to the variance.
    """
    attrs = {"num_groups": int(num_groups), "eps": float(eps)}
    return emit(_GROUP_NORM, [t, weight, bias], attrs)[0]


def _batch_norm(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float, momentum: float
) -> Any:
    parameters = {"scale": scale, "bias": bias, "mean": mean, "var": var}
    s, b, m, v = (_per_channel(x, p, name) for name, p in parameters.items())
    return (x - m) * lax.rsqrt(v + epsilon) * s + b


_BATCH_NORM = define("batch_norm_inference", float_op(_batch_norm), result="batch_norm_out")


def batch_norm_inference(
    t: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
) -> Tensor:
    """Normalizes channels by given statistics (Ioffe and Szegedy, 2015), scales and shifts.

    Args:
        t: (batch, channels, ...).
        scale, bias, mean, var: (channels,), of any float dtype.
        epsilon: added to the variance.
        momentum: of the running statistics, which inference leaves alone; no effect.
    """
    attrs = {"epsilon": float(epsilon), "momentum": float(momentum)}
    return emit(_BATCH_NORM, [t, scale, bias, mean, var], attrs)[0]
