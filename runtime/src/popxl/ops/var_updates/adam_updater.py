"""Update terms of Adam (Kingma and Ba, 2015), AdaMax (ibid.) and LAMB (You et al., 2020).

An updater turns the moments into an update; `adam_var_update` subtracts it from the weight. Time
steps count updates: the op that uses one increments it first, in place, so it starts at 0.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl._ir.op_registry import OpDef, define
from popxl.ops._emit import emit
from popxl.ops._scalars import emit_with_scalars, with_scalars
from popxl.ops.var_updates._store import NO_GRAD, to_float32_array
from popxl.tensor import Tensor

_TAGS = ("elementwise",)


def _increment_step(step: Any) -> Any:
    return step + jnp.ones((), step.dtype)


_NEXT_STEP = define("next_time_step", _increment_step, grad=NO_GRAD, tags=_TAGS)


def _correct_bias(moment: Any, beta: Any, step: Any) -> Any:
    """Divides a moving average that started at 0 by the sum of its weights, 1 - beta^step."""
    return moment if step is None else moment / (1 - jnp.power(to_float32_array(beta), step))


def _add_weight_decay(update: Any, weight: Any, weight_decay: Any) -> Any:
    return update if weight_decay is None else update + to_float32_array(weight_decay) * weight


def _float32_operands(arrays: tuple[Any, ...], with_weight: bool, with_step: bool) -> list[Any]:
    """Returns Adam's moments, weight and time step in float32; missing ones are None."""
    rest = list(arrays)
    first, second = to_float32_array(rest.pop(0)), to_float32_array(rest.pop(0))
    weight = to_float32_array(rest.pop(0)) if with_weight else None
    step = rest.pop(0).astype(jnp.float32).reshape(()) if with_step else None
    return [first, second, weight, step]


@with_scalars
def _adam(
    *arrays: Any,
    with_weight: bool,
    with_step: bool,
    epsilon: Any,
    weight_decay: Any = None,
    beta1: Any = None,
    beta2: Any = None,
) -> Any:
    m, v, weight, step = _float32_operands(arrays, with_weight, with_step)
    update = _correct_bias(m, beta1, step) / (
        jnp.sqrt(_correct_bias(v, beta2, step)) + to_float32_array(epsilon)
    )
    return _add_weight_decay(update, weight, weight_decay)


@with_scalars
def _adamax(
    *arrays: Any,
    with_weight: bool,
    with_step: bool,
    epsilon: Any,
    beta1: Any,
    weight_decay: Any = None,
) -> Any:
    m, largest, weight, step = _float32_operands(arrays, with_weight, with_step)
    return _add_weight_decay(
        _correct_bias(m, beta1, step) / (largest + to_float32_array(epsilon)), weight, weight_decay
    )


_ADAM = define("adam_updater", _adam, grad=NO_GRAD, tags=_TAGS)
_LAMB = define("lamb_updater", _adam, grad=NO_GRAD, tags=_TAGS)
_ADAMAX = define("adamax_updater", _adamax, grad=NO_GRAD, tags=_TAGS)


def weight_decay_is_required(weight_decay: None | float | Tensor) -> bool:
    """True if weight decay is a tensor, or a number other than 0."""
    return isinstance(weight_decay, Tensor) or bool(weight_decay)


def _check_weight(op_name: str, weight: Tensor | None, weight_decay: float | Tensor | None) -> None:
    if weight is None and weight_decay_is_required(weight_decay):
        raise ValueError(f"{op_name}: weight_decay needs the weight")


def _emit_updater(
    defn: OpDef,
    moments: tuple[Tensor, Tensor],
    weight: Tensor | None,
    time_step: Tensor | None,
    weight_decay: float | Tensor | None,
    **scalars: float | Tensor | None,
) -> Tensor:
    decay = weight_decay if weight_decay_is_required(weight_decay) else None
    operands = [*moments]
    if decay is not None and weight is not None:
        operands.append(weight)
    if time_step is not None:
        operands.append(emit(_NEXT_STEP, [time_step], inplace=0)[0])
    attrs = {"with_weight": decay is not None, "with_step": time_step is not None}
    return emit_with_scalars(defn, operands, {**scalars, "weight_decay": decay}, attrs)[0]


def _corrected_updater(
    defn: OpDef,
    moments: tuple[Tensor, Tensor],
    weight: Tensor | None,
    time_step: Tensor | None,
    weight_decay: float | Tensor | None,
    betas: dict[str, float | Tensor | None],
    epsilon: float | Tensor,
) -> Tensor:
    _check_weight(defn.name, weight, weight_decay)
    if time_step is not None and None in betas.values():
        raise ValueError(f"{defn.name}: bias correction by time_step needs beta1 and beta2")
    given = {} if time_step is None else betas
    return _emit_updater(defn, moments, weight, time_step, weight_decay, epsilon=epsilon, **given)


def adam_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: float | Tensor | None = None,
    beta1: float | Tensor | None = None,
    beta2: float | Tensor | None = None,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """Returns Adam's update, m / (sqrt(v) + epsilon) + weight_decay * weight, in float32.

    Args:
        acc_first_order, acc_second_order: moving averages m of the gradient and v of its square.
        weight: needed for weight decay.
        time_step: number of updates made before, a float32 or int32 tensor of one element. If
            given, it is incremented in place, and m and v are divided by 1 - beta^time_step.
        beta1, beta2: decay rates of the moving averages, needed with `time_step`.

    Raises:
        ValueError: weight decay without a weight, or a time step without both betas.
    """
    moments, betas = (acc_first_order, acc_second_order), {"beta1": beta1, "beta2": beta2}
    return _corrected_updater(_ADAM, moments, weight, time_step, weight_decay, betas, epsilon)


def lamb_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: float | Tensor | None = None,
    beta1: float | Tensor | None = None,
    beta2: float | Tensor | None = None,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """Returns LAMB's update before its trust ratio, which `adam_var_update` applies.

    The formula and the arguments are those of `adam_updater`.
    """
    moments, betas = (acc_first_order, acc_second_order), {"beta1": beta1, "beta2": beta2}
    return _corrected_updater(_LAMB, moments, weight, time_step, weight_decay, betas, epsilon)


def adamax_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: float | Tensor | None = None,
    beta1: float | Tensor = 0.9,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """Returns AdaMax's update in float32.

    m / (1 - beta1^time_step) / (u + epsilon) + weight_decay * weight.

    Args:
        acc_first_order: moving average m of the gradient.
        acc_second_order: decayed maximum u of its absolute value.
        time_step: as for `adam_updater`, but required.

    Raises:
        ValueError: no time step, or weight decay without a weight.
    """
    _check_weight("adamax_updater", weight, weight_decay)
    if time_step is None:
        raise ValueError("adamax_updater: time_step is needed for the bias correction")
    moments = (acc_first_order, acc_second_order)
    return _emit_updater(
        _ADAMAX, moments, weight, time_step, weight_decay, epsilon=epsilon, beta1=beta1
    )
