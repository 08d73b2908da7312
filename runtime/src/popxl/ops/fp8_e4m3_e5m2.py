"""Linear layers in FP8: matmuls of e4m3 and e5m2 operands, accumulated in float32.

An operand is multiplied by its scale, cut off at the largest number of its type and rounded; the
product is divided by both scales again. Formats and method: Micikevicius et al., arXiv:2209.05433.

Scales come from largest absolute values ("amax"): of the operand itself (current scaling), or of
the operands of past steps (delayed scaling). With delayed scaling `linear` observes the amax of its
three operands: input, weight and gradient of the output. They leave the gradient graph as the
gradient of `scale`, which is none: the `max_gradient_inputs` of an `OpDef`. Where derivatives of
one tensor are summed, of these the largest is taken. So whatever brings gradients out of a program
(calls, loops, accumulation over micro-batches) brings them out too; and since only the gradient
graph returns them, running a forward graph again counts nothing twice.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._computed_apart import computed_apart
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating
from popxl.ops._reductions import traced_platform
from popxl.ops.elementwise import cast as cast_to
from popxl.ops.elementwise import name_after_dtype
from popxl.ops.reduction import sum_to_like
from popxl.tensor import Tensor

__all__ = [
    "EXACT",
    "FORMATS",
    "LARGEST",
    "OPERANDS",
    "Format",
    "ScaleRule",
    "cast",
    "delayed_scales",
    "linear",
]

LARGEST = {t: t.largest for t in (dtypes.float8_e4m3fn, dtypes.float8_e5m2)}
"""Largest finite number of each type."""

OPERANDS = ("input", "weight", "gradient")
"""Operand of each element of scales and amaxes, in order; "gradient" is that of the output."""


@dataclass(frozen=True)
class Format:
    """FP8 dtypes of the operands (x, weight, output gradient) of a linear layer's three matmuls.

    Attributes:
        forward: of inputs and weights.
        gradient: of gradients of outputs. e5m2 has the range, e4m3 the precision.
    """

    forward: dtypes.dtype
    gradient: dtypes.dtype

    @property
    def types(self) -> tuple[dtypes.dtype, ...]:
        """FP8 dtype of each operand in `OPERANDS`."""
        return self.forward, self.forward, self.gradient


FORMATS = {
    "hybrid": Format(dtypes.float8_e4m3fn, dtypes.float8_e5m2),
    "e4m3": Format(dtypes.float8_e4m3fn, dtypes.float8_e4m3fn),
}
"""Formats by name, as Transformer Engine calls them."""


@dataclass(frozen=True)
class ScaleRule:
    """Rule that derives an FP8 scale from a tensor's largest absolute value (amax).

    Attributes:
        margin: powers of two to stay below the largest number of the type.
        power_of_2: round scales down to powers of two, by which multiplication is exact.
    """

    margin: int = 0
    power_of_2: bool = True

    @staticmethod
    def log2_scale(amax: Any, largest: Any) -> Any:
        """Returns floor(log2(largest / amax)), int32; at most 127, also where `amax` is 0.

        The powers of two by which `amax` is below `largest`.
        """
        ratio = jnp.asarray(largest, jnp.float32) / amax
        _, exponent = jnp.frexp(ratio)  # ratio = m * 2**exponent, with m in [0.5, 1)
        return jnp.where(jnp.isinf(ratio), 127, exponent - 1)

    def __call__(self, amax: Any, largest: Any, fallback: Any) -> Any:
        """Returns the scales for arrays of amaxes.

        Args:
            amax: float32, at least 0.
            largest: largest number of the type.
            fallback: scales where `amax` is 0, infinite or NaN, and says nothing.

        Returns:
            (largest / amax) / 2**margin, at most the largest float32; with `power_of_2` the largest
            power of two that is no larger.
        """
        ratio = jnp.asarray(largest, jnp.float32) / amax
        if self.power_of_2:
            powers = jnp.clip(self.log2_scale(amax, largest) - self.margin, -126, 127)
            scale = jnp.ldexp(jnp.float32(1), jnp.where(jnp.isinf(ratio), 127, powers))
        else:
            scale = jnp.minimum(ratio * jnp.float32(2.0**-self.margin), jnp.finfo(jnp.float32).max)
        return jnp.where((amax > 0) & jnp.isfinite(amax), scale, fallback).astype(jnp.float32)


EXACT = ScaleRule()
"""Powers of two, and no margin."""

_Rule = tuple[int, bool]  # the fields of a ScaleRule, as ops have them


# ---- casts and products, in JAX -----------------------------------------------------------------
def _saturate(x: Any, scale: Any, dtype: dtypes.dtype) -> Any:
    """Returns x * scale in float8, clipped to the finite range, since XLA's casts overflow."""
    largest = LARGEST[dtype]
    wide = x.astype(jnp.float32) * scale
    return jnp.clip(wide, -largest, largest).astype(dtype.as_jax())


def _amax(x: Any) -> Any:
    sizes = jnp.abs(x.astype(jnp.float32))
    if traced_platform() != "cpu" and x.ndim > 1:
        # By columns first, as the gradient of a bias: XLA for GPUs then reads x once for both.
        sizes = jnp.max(sizes, tuple(range(x.ndim - 1)), initial=0.0)
    return jnp.max(sizes, initial=0.0)


def _scaled_matmul(
    a: Any, b: Any, a_scale: Any, b_scale: Any, axes: tuple[int, int], dtype: Any, exact: bool
) -> Any:
    """Returns the matmul over axis `axes[0]` of a and `axes[1]` of b, unscaled, in `dtype`.

    XLA's GemmRewriter makes either form one call of cublasLt's FP8 product. Where the operands are
    scaled back first, the call also takes both scales, gives its result in bfloat16 and adds a bias
    that follows: nothing passes over a float32 result. That form rounds scales to bfloat16, so it
    needs scales that are `exact`, powers of two. A float32 result it adds to an accumulator.
    """
    dims, half = (((axes[0],), (axes[1],)), ((), ())), jnp.bfloat16
    if exact and (dtype == half or (dtype == jnp.float32 and traced_platform() != "cpu")):
        a, b = (t.astype(half) * (1 / s).astype(half) for t, s in ((a, a_scale), (b, b_scale)))
        return lax.dot_general(a, b, dims, preferred_element_type=dtype)
    y = lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    return (y * (1 / a_scale) * (1 / b_scale)).astype(dtype)


# ---- the linear map -----------------------------------------------------------------------------
def _current_scale(rule: _Rule, amax: Any, dtype: dtypes.dtype) -> Any:
    return ScaleRule(*rule)(amax, LARGEST[dtype], jnp.float32(1))


def _quantize_operand(
    t: Any, apart: Any, *scale: Any, operand_index: int, format: str, rule: _Rule | None = None
) -> tuple[Any, ...]:
    """Returns (t in float8, its scale, its amax).

    Args:
        apart: t, see `computed_apart`.
        operand_index: of t in `OPERANDS`.
    """
    check_floating(t)
    amax, dtype = _amax(apart), FORMATS[format].forward
    this_scale = scale[0][operand_index] if rule is None else _current_scale(rule, amax, dtype)
    return _saturate(t, this_scale, dtype), this_scale, amax


def _linear(
    x8: Any, x_scale: Any, x_amax: Any, w8: Any, w_scale: Any, w_amax: Any, *rest: Any,
    io_dtypes: tuple[dtypes.dtype, ...], format: str, exact: bool, biased: bool = False,
    rule: _Rule | None = None,
) -> Any:  # fmt: skip
    """Returns x @ w (+ bias) from FP8 operands, in the last of `io_dtypes`."""
    if w8.ndim != 2 or x8.ndim < 1 or x8.shape[-1] != w8.shape[0]:
        raise ValueError(f"x {x8.shape} and the matrix {w8.shape} do not fit")
    result = io_dtypes[-1].as_jax()
    rows = x8.reshape((-1, x8.shape[-1]))
    y = _scaled_matmul(rows, w8, x_scale, w_scale, (1, 0), result, exact)
    y = y + rest[-1].astype(result) if biased else y
    return y.reshape((*x8.shape[:-1], w8.shape[1]))


def _linear_grads(
    dy: Any, apart: Any, x8: Any, x_scale: Any, x_amax: Any, w8: Any, w_scale: Any, w_amax: Any,
    *scale: Any, format: str, exact: bool, results: tuple[dtypes.dtype, dtypes.dtype],
    rule: _Rule | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns (dx, dw) in the dtypes `results`, and with delayed scaling the three amaxes.

    Elsewhere than on CPUs dy is rounded in the kernel of its sums, and transposed in another: XLA
    for GPUs would do both in one, and the sums in another.

    Args:
        apart: dy, see `computed_apart`.
    """
    amax, dtype = _amax(apart), FORMATS[format].gradient
    this_scale = scale[0][2] if rule is None else _current_scale(rule, amax, dtype)
    dy8 = _saturate(dy, this_scale, dtype).reshape((-1, dy.shape[-1]))
    if traced_platform() != "cpu":
        dy8 = lax.optimization_barrier(dy8)
    x8_rows = x8.reshape((-1, x8.shape[-1]))
    of_x, of_w = (t.as_jax() for t in results)
    dx = _scaled_matmul(dy8, w8, this_scale, w_scale, (1, 1), of_x, exact).reshape(x8.shape)
    dw = _scaled_matmul(x8_rows, dy8, x_scale, this_scale, (0, 0), of_w, exact)
    return (dx, dw) if rule is not None else (dx, dw, jnp.stack([x_amax, w_amax, amax]))


_LINEAR_GRADS = define(
    "fp8_linear_grads",
    _linear_grads,
    grad=NoGrad("second derivatives of FP8 products are not supported"),
)


def _operand_grad(ctx: Any, op: Op, dt: Tensor | None, *_: Any) -> list[Tensor | None]:
    """Straight-through gradient of rounding to FP8, in the dtype in which `_linear_grad` gives it.

    Inside a graph that is the source's.
    """
    source = op.inputs[0]
    if dt is not None and dt.dtype != source.dtype and source._producer is not None:
        dt = cast_to(dt, source.dtype)
    return [dt, *[None] * (len(op.inputs) - 1)]


def _linear_grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    residuals = [ctx.fwd(t) for t in op.inputs]
    bias = [residuals.pop()] if op.attrs["biased"] else []
    attrs = {k: v for k, v in op.attrs.items() if k not in ("io_dtypes", "biased")}
    of_x, of_w = op.attrs["io_dtypes"][:2]
    attrs["results"] = of_x, ctx.weight_gradient_dtype(of_w)
    dx, dw, *amaxes = emit(_LINEAR_GRADS, [dy, computed_apart(dy, 1), *residuals], attrs)
    grads: list[Tensor | None] = [dx, None, None, dw, None, None, *amaxes]
    if bias:
        needed = ctx.needs(op, len(op.inputs) - 1)
        grads.append(sum_to_like(computed_apart(dy, 2), *bias) if needed else None)
    return [g if ctx.needs(op, i) else None for i, g in enumerate(grads)]


_OPERAND = define(
    "fp8_operand", _quantize_operand, grad=_operand_grad, tags=("elementwise", "reduction")
)
_LINEAR = define("fp8_linear", _linear, grad=_linear_grad, max_gradient_inputs=(6,))
_LINEAR_CURRENT = define("fp8_linear_current", _linear, grad=_linear_grad)


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    format: str = "hybrid",
    rule: ScaleRule | None = None,
    powers_of_2: bool = False,
    output_type: dtypes.dtype | None = None,
) -> Tensor:
    """Returns x @ weight + bias with FP8 operands, whose gradients are FP8 matmuls too.

    Gradients go straight through the rounding. That of `scale` is the amax of each of `OPERANDS`
    in this call, float32 (3,): see `popxl.transforms.tensors_with_max_gradient`.

    Args:
        x: (..., in_features), of any float type but float8.
        weight: (in_features, out_features).
        scale: delayed scaling: float32 (3,), by which each of `OPERANDS` is multiplied.
        bias: (out_features,), added to the product as it is rounded to the result's dtype.
        format: name of one of `FORMATS`.
        rule: current scaling: how scales follow from the operands themselves.
        powers_of_2: delayed scaling: all elements of `scale` are powers of two. A product in
            bfloat16 then takes less memory traffic on a GPU; with other scales it is wrong by up
            to 2**-8 of each element. With `rule`, the rule says so.
        output_type: dtype of the result; default: that of x.

    Returns:
        (..., out_features).

    Raises:
        ValueError: both or neither of `scale` and `rule` are given, or the format is unknown.
        SpecError: the shapes do not fit.
    """
    if (scale is None) == (rule is None):
        raise ValueError("fp8.linear: give `scale` for delayed scaling or `rule` for current")
    _check_format(format)
    attrs: dict[str, Any] = {"format": format, "rule": None if rule is None else astuple(rule)}
    this_scale = [] if scale is None else [scale]
    # Ops of their own, for all that the gradient takes: where a forward pass is run again for it,
    # the product of which only the layer's output is made is left out.
    operands = [
        part
        for operand_index, t in enumerate((x, weight))
        for part in emit(
            _OPERAND, [t, computed_apart(t), *this_scale], attrs | {"operand_index": operand_index}
        )
    ]
    attrs |= {
        "exact": powers_of_2 if rule is None else rule.power_of_2,
        "biased": bias is not None,
        "io_dtypes": (x.dtype, weight.dtype, output_type or x.dtype),
    }
    op = _LINEAR if rule is None else _LINEAR_CURRENT
    return emit(op, [*operands, *this_scale, *([] if bias is None else [bias])], attrs)[0]


def _check_format(name: str) -> None:
    if name not in FORMATS:
        raise ValueError(f"unknown FP8 format {name!r}: use one of {', '.join(FORMATS)}")


# ---- delayed scaling ----------------------------------------------------------------------------
AmaxOf = Literal["max", "most_recent"]


def _delayed_scales(
    scale: Any, history: Any, amax: Any, *step: Any,
    format: str, rule: _Rule, amax_of: AmaxOf, interval: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Lowers `delayed_scales`: computes the next step's FP8 scales."""
    amaxes = jnp.where(jnp.isfinite(amax), amax, 0)
    history = jnp.concatenate([amaxes[:, None], history[:, :-1]], 1)
    largest = jnp.asarray([LARGEST[t] for t in FORMATS[format].types], jnp.float32)
    amax_used = history.max(1) if amax_of == "max" else history[:, 0]
    new = ScaleRule(*rule)(amax_used, largest, scale)
    if not step:
        return new, history
    return jnp.where(step[0] % interval == 0, new, scale), history, step[0] + 1


_DELAYED_SCALES = define(
    "fp8_delayed_scales", _delayed_scales, grad=NoGrad("scales are not differentiated")
)


def delayed_scales(
    scale: Tensor,
    history: Tensor,
    amax: Tensor,
    step: Tensor | None = None,
    *,
    format: str = "hybrid",
    rule: ScaleRule = ScaleRule(),
    amax_of: AmaxOf = "max",
    interval: int = 1,
) -> tuple[Tensor, ...]:
    """Returns scales for the next step from the amax history; call once per weight update.

    As Transformer Engine's DelayedScaling, with one difference: an amax that is not finite enters
    the history as 0, so that one overflow does not freeze the scale for the length of the history.

    Args:
        scale: float32 (3,), one for each of `OPERANDS`, as all that follow.
        history: float32 (3, length), the latest first.
        amax: float32 (3,), the largest of this step's micro-batches and replicas.
        step: int32 scalar, weight updates so far. Needed for an `interval` above 1.
        format: name of one of `FORMATS`.
        rule: how scales follow from amaxes.
        amax_of: "max": the scale follows from the largest amax in the history, "most_recent": from
            the latest.
        interval: weight updates between changes of the scale.

    Returns:
        The new scale, history and (if given) step.

    Raises:
        ValueError: `interval` needs a `step`, or the format is unknown.
    """
    if interval > 1 and step is None:
        raise ValueError(f"fp8.delayed_scales: an interval of {interval} needs `step`")
    _check_format(format)
    inputs = [scale, history, amax, *([] if step is None else [step])]
    attrs = {"format": format, "rule": astuple(rule), "amax_of": amax_of, "interval": interval}
    return tuple(emit(_DELAYED_SCALES, inputs, attrs))


# ---- casts --------------------------------------------------------------------------------------
_CAST = define(
    "fp8_cast",
    lambda x, scale, dtype: _saturate(x, scale, dtype),
    grad=NoGrad("differentiate fp8.linear, which has the products of its gradients in FP8 too"),
    result=name_after_dtype,
)


def cast(t: Tensor, scale: Tensor, data_type: dtypes.dtype) -> Tensor:
    """Returns t * scale, rounded to nearest even and clipped to the dtype's finite range.

    NaN stays NaN.

    Args:
        t: of any float type but float8.
        scale: float32 scalar.
        data_type: `popxl.float8_e4m3fn` or `popxl.float8_e5m2`.

    Raises:
        TypeError: `data_type` is no such type.
    """
    if data_type not in LARGEST:
        raise TypeError(f"fp8.cast: {data_type!r} is neither float8_e4m3fn nor float8_e5m2")
    return emit(_CAST, [t, scale], {"dtype": data_type})[0]
