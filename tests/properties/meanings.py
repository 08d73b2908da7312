"""What programs of `language` mean: in popxl, in numpy with storage and views, and in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from tests.properties.language import IN_PLACE_UNARY, Body, Step

# ---- popxl --------------------------------------------------------------------------------------
POPXL_VALUES: dict[str, Callable[..., Any]] = {
    "tanh": ops.tanh,
    "sin": ops.sin,
    "swish": ops.swish,
    "gelu": ops.gelu,
    "negate": ops.negate,
    "half": lambda x: x * 0.5,
    "abs": ops.abs,
    "relu": ops.relu,
    "add": lambda a, b: (a + b) * 0.5,
    "sub": lambda a, b: (a - b) * 0.5,
    "mul": lambda a, b: ops.tanh(a * b),
    "quotient": lambda a, b: a / (b * b + 1),
    "maximum": ops.maximum,
    "matmul": lambda a, b: (a @ b) * 0.25,
    "concat": lambda a, b, axis: ops.concat([a, b], axis),
    "concat_": lambda a, b, axis: ops.concat_([a, b], axis),
    "softmax": ops.softmax,
    "mean": ops.mean,
    "sumsquare": lambda x, axis, keep: ops.tanh(ops.sumsquare(x, axis, keep)),
    "logsumexp": ops.logsumexp,
    "max": ops.max,
    "min": ops.min,
    "reshape": ops.reshape,
    "reshape_": ops.reshape_,
    "transpose": ops.transpose,
    "transpose_": ops.transpose_,
    "slice": lambda x, axis, start, stop, step: ops.slice(x, start, stop, step, axis),
    "slice_": lambda x, axis, start, stop, step: ops.slice_(x, start, stop, step, axis),
    "zeros": lambda shape: ops.init(shape, popxl.float32),
}
POPXL_IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": ops.add_,
    "scaled_add_": lambda t, x: ops.scaled_add_(t, x, a=0.5, b=-0.25),
    "copy_var_update_": ops.var_updates.copy_var_update_,
    "accumulate_": lambda t, x: ops.var_updates.accumulate_moving_average_(t, x, 0.75),
    "tanh_copy": lambda t, x: ops.var_updates.copy_var_update_(t, ops.tanh(x)),
    "relu_": ops.relu_,
    "gelu_": ops.gelu_,
    "swish_": ops.swish_,
}


def write_popxl(body: Body, inputs: Sequence[popxl.Tensor]) -> list[popxl.Tensor]:
    """Write the program into the current graph; returns its outputs."""
    tensors = list(inputs)
    for step in body.steps:
        args = [tensors[i] for i in step.args]
        if step.kind in POPXL_IN_PLACE:
            POPXL_IN_PLACE[step.kind](*args)
        elif step.kind == "call":
            tensors.extend(ops.call(_graph(step.params[0]), *args))
        elif step.kind == "repeat":
            inner, count = step.params
            tensors.extend(ops.repeat(_graph(inner), count, *args))
        elif step.kind == "conditional":
            tensors.extend(_conditional(step, args))
        else:
            tensors.append(POPXL_VALUES[step.kind](*args, *step.params))
    return [tensors[i] for i in body.outputs]


def _conditional(step: Step, args: list[popxl.Tensor]) -> tuple[popxl.Tensor, ...]:
    then, otherwise, count = step.params
    is_large = ops.greater(ops.sum(args[0]), popxl.constant(0.1))
    branches = _graph(then), _graph(otherwise)
    return ops.conditional(is_large, *branches, args[1 : 1 + count], args[1 + count :])


def _graph(body: Body) -> popxl.Graph:
    def build() -> list[popxl.Tensor]:
        pairs = zip(body.inputs, body.by_ref, strict=True)
        inputs = [popxl.graph_input(shape, popxl.float32, by_ref=ref) for shape, ref in pairs]
        return write_popxl(body, inputs)

    return popxl.gir().create_graph(build)


# ---- values that numpy and JAX compute alike ----------------------------------------------------
def _gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _exp_normalised(xp: Any, x: Any, axis: int) -> Any:
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return e / xp.sum(e, axis=axis, keepdims=True)


def _slice(xp: Any, x: Any, axis: int, start: int, stop: int, step: int) -> Any:
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


ARRAY_VALUES: dict[str, Callable[..., Any]] = {
    "tanh": lambda xp, x: xp.tanh(x),
    "sin": lambda xp, x: xp.sin(x),
    "swish": lambda xp, x: x / (1 + xp.exp(-x)),
    "gelu": _gelu,
    "negate": lambda xp, x: -x,
    "half": lambda xp, x: x * 0.5,
    "abs": lambda xp, x: xp.abs(x),
    "relu": lambda xp, x: xp.maximum(x, 0),
    "add": lambda xp, a, b: (a + b) * 0.5,
    "sub": lambda xp, a, b: (a - b) * 0.5,
    "mul": lambda xp, a, b: xp.tanh(a * b),
    "quotient": lambda xp, a, b: a / (b * b + 1),
    "maximum": lambda xp, a, b: xp.maximum(a, b),
    "matmul": lambda xp, a, b: (a @ b) * 0.25,
    "concat": lambda xp, a, b, axis: xp.concatenate([a, b], axis),
    "softmax": _exp_normalised,
    "mean": lambda xp, x, axis, keep: xp.mean(x, axis=axis, keepdims=keep),
    "sumsquare": lambda xp, x, axis, keep: xp.tanh(xp.sum(x * x, axis=axis, keepdims=keep)),
    "logsumexp": lambda xp, x, axis, keep: xp.log(xp.sum(xp.exp(x), axis=axis, keepdims=keep)),
    "max": lambda xp, x, axis, keep: xp.max(x, axis=axis, keepdims=keep),
    "min": lambda xp, x, axis, keep: xp.min(x, axis=axis, keepdims=keep),
    "reshape": lambda xp, x, shape: xp.reshape(x, shape),
    "transpose": lambda xp, x, axes: xp.transpose(x, axes),
    "slice": _slice,
    "zeros": lambda xp, shape: xp.zeros(shape),
}


# ---- numpy --------------------------------------------------------------------------------------
class Memory:
    """All numbers of a program in one array, where tensors are positions: views of any kind.

    numpy's own views cannot follow a transpose with a reshape, nor join two arrays.
    """

    def __init__(self) -> None:
        self.numbers = np.zeros(0)

    def new(self, value: np.ndarray) -> np.ndarray:
        """A tensor of its own: positions, of the shape of `value`."""
        value = np.asarray(value, np.float64)
        start = len(self.numbers)
        self.numbers = np.concatenate([self.numbers, value.ravel()])
        return np.arange(start, start + value.size).reshape(value.shape)


NUMPY_IN_PLACE: dict[str, Callable[..., np.ndarray]] = {
    "add_": lambda t, x: t + x,
    "scaled_add_": lambda t, x: 0.5 * t - 0.25 * x,
    "copy_var_update_": lambda t, x: x,
    "accumulate_": lambda t, x: 0.75 * t + 0.25 * x,
    "tanh_copy": lambda t, x: np.tanh(x),
    **{k: lambda t, k=k: ARRAY_VALUES[k.removesuffix("_")](np, t) for k in IN_PLACE_UNARY},
}


def run_numpy(memory: Memory, body: Body, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run the program on tensors in `memory`, whose numbers it may change; returns tensors."""
    tensors = list(inputs)
    for step in body.steps:
        args = [tensors[i] for i in step.args]
        values = [memory.numbers[a] for a in args]
        if step.kind in NUMPY_IN_PLACE:
            memory.numbers[args[0]] = NUMPY_IN_PLACE[step.kind](*values)
        elif step.kind == "call":
            tensors.extend(_call_numpy(memory, step.params[0], args))
        elif step.kind == "repeat":
            tensors.extend(_repeat_numpy(memory, *step.params, args))
        elif step.kind == "conditional":
            then, otherwise, count = step.params
            is_large = values[0].sum() > 0.1
            chosen = (then, args[1 : 1 + count]) if is_large else (otherwise, args[1 + count :])
            tensors.extend(_call_numpy(memory, *chosen))
        elif step.kind.endswith("_"):  # the same numbers, seen otherwise
            tensors.append(ARRAY_VALUES[step.kind[:-1]](np, *args, *step.params))
        else:
            tensors.append(memory.new(ARRAY_VALUES[step.kind](np, *values, *step.params)))
    return [tensors[i] for i in body.outputs]


def _call_numpy(memory: Memory, body: Body, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """References are the tensors themselves, values are copies."""
    pairs = zip(args, body.by_ref, strict=True)
    inputs = [a if ref else memory.new(memory.numbers[a]) for a, ref in pairs]
    return [memory.new(memory.numbers[t]) for t in run_numpy(memory, body, inputs)]


def _repeat_numpy(
    memory: Memory, body: Body, count: int, args: Sequence[np.ndarray]
) -> list[np.ndarray]:
    carried = args[: len(body.outputs)]
    if count == 0:
        return [memory.new(memory.numbers[a]) for a in carried]
    outputs = list(carried)
    for _ in range(count):
        outputs = _call_numpy(memory, body, [*outputs, *args[len(outputs) :]])
    return outputs


# ---- JAX ----------------------------------------------------------------------------------------
def run_jax(body: Body, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a program that changes nothing in place."""
    tensors = list(inputs)
    for step in body.steps:
        args = [tensors[i] for i in step.args]
        if step.kind == "call":
            tensors.extend(run_jax(step.params[0], args))
        elif step.kind == "repeat":
            tensors.extend(_repeat_jax(*step.params, args))
        elif step.kind == "conditional":
            then, otherwise, count = step.params
            is_large = args[0].sum() > 0.1
            branches = (then, args[1 : 1 + count]), (otherwise, args[1 + count :])
            pairs = zip(*(run_jax(*branch) for branch in branches), strict=True)
            tensors.extend(jnp.where(is_large, a, b) for a, b in pairs)
        else:
            fn = ARRAY_VALUES[step.kind.removesuffix("_")]
            tensors.append(fn(jnp, *args, *step.params))
    return [tensors[i] for i in body.outputs]


def _repeat_jax(body: Body, count: int, args: Sequence[jax.Array]) -> list[jax.Array]:
    outputs = list(args[: len(body.outputs)])
    for _ in range(count):
        outputs = run_jax(body, [*outputs, *args[len(outputs) :]])
    return outputs
