"""What an op does, as JAX's primitives: the meaning of the op traced on abstract values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from popxl._core.infer import _freeze

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.tensor import TensorSpec

# Primitives that only move or rename elements; all others count as arithmetic.
MOVES = frozenset(
    """broadcast_in_dim broadcast reshape transpose slice dynamic_slice dynamic_update_slice pad
    concatenate iota rev squeeze expand_dims gather scatter copy copy_p device_put
    convert_element_type bitcast_convert_type stop_gradient split optimization_barrier""".split()
)


@dataclass(frozen=True)
class Step:
    """One primitive of an expansion.

    Attributes:
        inputs: numbers of the values it reads; -1 is a number written into the program.
        outputs: (shape, bytes of an element) of what it makes.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], int], ...]
    flops: int
    arithmetic: int
    facts: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass
class Expansion:
    """Steps of a function. Values are numbered: its arguments, then the outputs of the steps."""

    arguments: int
    steps: list[Step] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    values: int = 0

    def add(self, step: Step) -> list[int]:
        """Append a step; returns the numbers of its outputs."""
        self.steps.append(step)
        first, self.values = self.values, self.values + len(step.outputs)
        return list(range(first, self.values))


_CACHE: dict[Any, Expansion] = {}


def expansion_of(op: Op) -> Expansion:
    """The primitives of a pure op."""
    assert op.defn.lower is not None
    key = op.defn.name, tuple((t.shape, t.dtype) for t in op.inputs), _freeze(op.attrs)
    lower = op.defn.lower
    return _cached(key, lambda *xs: lower(*xs, **op.attrs), [t.spec for t in op.inputs], op)


def write_through(op: Op, value: TensorSpec) -> Expansion:
    """The primitives that store a value through the view that `op` makes into its inputs."""
    write = op.defn.view_write
    assert write is not None, f"{op.name} has no rule to write through"
    specs = [t.spec for t in op.inputs]
    key = "write", op.defn.name, tuple((s.shape, s.dtype) for s in specs), _freeze(op.attrs)
    return _cached(key, lambda *xs: write(xs[:-1], xs[-1], **op.attrs), [*specs, value], op)


def _cached(
    key: Any, function: Callable[..., Any], specs: Sequence[TensorSpec], op: Op
) -> Expansion:
    if key not in _CACHE:
        arrays = [jax.ShapeDtypeStruct(s.shape, s.dtype.as_jax()) for s in specs]
        replicas = op.graph.ir.replication_factor
        traced = jax.make_jaxpr(function, axis_env=[("r", replicas)])(*arrays)
        found = Expansion(len(arrays), values=len(arrays))
        found.results = _inline(found, traced.jaxpr, list(range(len(arrays))))
        _CACHE[key] = found
    return _CACHE[key]


def _inline(into: Expansion, jaxpr: Jaxpr, arguments: Sequence[int]) -> list[int]:
    """Add the primitives of `jaxpr`, called functions included; numbers of its results."""
    number: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> int:
        return -1 if isinstance(atom, Literal) else number.get(atom, -1)

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        inner = _function_of(eqn)
        if inner is not None:
            outs = _inline(into, inner, inputs[len(inputs) - len(inner.invars) :])
        else:
            outs = into.add(_step(eqn, inputs))
        number.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


_FACTS = ("axes", "permutation", "dimension")
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr"}  # fmt: skip


def _function_of(eqn: Any) -> Jaxpr | None:
    """The function that an equation calls, if that is all it does."""
    if eqn.primitive.name not in _CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return _open(eqn.params[key])
    return None


def _open(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _step(eqn: Any, inputs: Sequence[int]) -> Step:
    outputs = tuple((tuple(v.aval.shape), _itemsize(v.aval)) for v in eqn.outvars)
    name = eqn.primitive.name
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    flops = _flops(eqn)
    arithmetic = 0 if name in MOVES or flops else max(sizes, default=0)
    facts: dict[str, Any] = {k: eqn.params[k] for k in _FACTS if k in eqn.params}
    if name == "dot_general":
        facts["batched"] = bool(eqn.params["dimension_numbers"][1][0])
    facts["meaning"] = _meaning(eqn, inputs)
    return Step(name, tuple(inputs), outputs, flops, arithmetic, facts)


def _meaning(eqn: Any, inputs: Sequence[int]) -> str | None:
    """What an equation does with the values it reads: two of the same meaning make the same of the
    same values. None if that is hard to say, and for barriers, which keep values apart."""
    numbers = [v.val for v in eqn.invars if isinstance(v, Literal)]
    known = len(numbers) == inputs.count(-1) and not any(map(_is_jaxpr, _leaves(eqn.params)))
    name = eqn.primitive.name
    return f"{name} {eqn.params} {numbers}" if known and name != "optimization_barrier" else None


def _itemsize(aval: Any) -> int:
    try:
        return aval.dtype.itemsize
    except AttributeError:  # a key of a random generator
        return 8


def _flops(eqn: Any) -> int:
    """Operations of matrix products and convolutions in an equation, loops included."""
    params = eqn.params
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return 2 * math.prod(eqn.outvars[0].aval.shape) * depth
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, params["dimension_numbers"]
        depth = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * depth
    bodies = [v for v in _leaves(params) if _is_jaxpr(v)]
    inner = sum(_flops(e) for body in bodies for e in _open(body).eqns)
    return inner * int(params.get("length", 1))


def _leaves(params: Mapping[str, Any]) -> list[Any]:
    return jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))
