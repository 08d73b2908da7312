"""Flattening of a jaxpr into a list of primitives, with called functions inlined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import Literal

from popxl._compile.lower_to_jax import PART_SCOPE
from popxl.ops._kernel_registry import KERNELS

_INLINED = frozenset("pjit jit closed_call core_call remat checkpoint custom_jvp_call "
                     "custom_vjp_call custom_vjp_call_jaxpr custom_lin".split())  # fmt: skip


@dataclass(eq=False)
class PrimitiveValue:
    """Result of a JAX primitive, with its JAX type `aval`.

    Attributes:
        is_zeros: true if all its elements are known to be zero.
    """

    aval: Any
    is_zeros: bool = False


@dataclass(eq=False)
class PrimitiveNode:
    """Application of a JAX primitive in a flat function.

    Attributes:
        name: JAX's name of the primitive, or of a function that is one kernel.
        atoms: input values and literals.
        outputs: output values.
        params: parameters, as in JAX.
        part: label of its region; "": the label of the caller.
        bodies: functions that it runs, and how often.
        branches: functions of which it runs one.
    """

    name: str
    atoms: list[Any]
    outputs: list[PrimitiveValue]
    params: dict[str, Any]
    part: str
    bodies: list[tuple[FlatFunction, int]] = field(default_factory=list)
    branches: list[FlatFunction] = field(default_factory=list)

    @property
    def inputs(self) -> list[PrimitiveValue]:
        return _drop_literals(self.atoms)

    @property
    def has_bodies(self) -> bool:
        return bool(self.bodies or self.branches)


@dataclass(eq=False)
class FlatFunction:
    """A function without calls: primitives in program order, constants, arguments and results."""

    nodes: list[PrimitiveNode]
    inputs: list[PrimitiveValue]
    results: list[Any]

    @property
    def outputs(self) -> list[PrimitiveValue]:
        """Results of the function that are not literals."""
        return _drop_literals(self.results)


def flatten_jaxpr(jaxpr: Any, region: str = "") -> FlatFunction:
    """Flattens a jaxpr: inlines called functions, and drops primitives with unused results."""
    inputs = _new_values([*jaxpr.constvars, *jaxpr.invars])
    nodes: list[PrimitiveNode] = []
    results = _inline_jaxpr(jaxpr, inputs, region, nodes)
    return FlatFunction(_live_nodes(nodes, _drop_literals(results)), inputs, results)


def _live_nodes(nodes: list[PrimitiveNode], outputs: list[PrimitiveValue]) -> list[PrimitiveNode]:
    """Returns the primitives whose results reach `outputs`, and those without results."""
    live_values, live_nodes = set(outputs), []
    for node in reversed(nodes):
        if not node.outputs or not live_values.isdisjoint(node.outputs):
            live_values.update(_live_inputs(node, live_values))
            live_nodes.append(node)
    return live_nodes[::-1]


def _live_inputs(node: PrimitiveNode, live_values: set[PrimitiveValue]) -> list[PrimitiveValue]:
    """Returns a primitive's inputs that its live outputs need; drops unused carries of a scan."""
    if node.name != "scan":
        return node.inputs
    ((body, count),) = node.bodies
    num_consts, num_carry = _consts_and_carry(node.params)
    body_inputs, body_results = body.inputs[-len(node.atoms) :], body.results
    live_outputs = {i for i, v in enumerate(node.outputs) if v in live_values}
    while True:
        results = _drop_literals([body_results[i] for i in live_outputs])
        needed = _live_nodes(body.nodes, results)
        used = {v for n in needed for v in n.inputs} | set(results)
        added = {i for i in range(num_carry) if body_inputs[num_consts + i] in used} - live_outputs
        if not added:
            break
        live_outputs |= added
    node.bodies = [(FlatFunction(needed, body.inputs, results), count)]
    dropped = {num_consts + i for i in range(num_carry)} - {num_consts + i for i in live_outputs}
    return _drop_literals([v for i, v in enumerate(node.atoms) if i not in dropped])


def _consts_and_carry(scan: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and of carries of a scan; JAX 0.11 and newer group them."""
    if "ft_in" not in scan:
        return scan["num_consts"], scan["num_carry"]
    num_consts, num_carry, _ = scan["ft_in"].update(range(len(scan["ft_in"].vals))).unpack()
    return len(list(num_consts)), len(list(num_carry))


def _new_values(variables: list[Any]) -> list[PrimitiveValue]:
    return [PrimitiveValue(v.aval) for v in variables]


def _drop_literals(atoms: list[Any]) -> list[PrimitiveValue]:
    return [v for v in atoms if isinstance(v, PrimitiveValue)]


def _inline_jaxpr(
    jaxpr: Any, inputs: list[Any], region: str, nodes: list[PrimitiveNode]
) -> list[Any]:
    """Appends the primitives of a jaxpr to `nodes` and returns its results.

    Args:
        inputs: values of its constants and arguments.

    Returns:
        The values of its results.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read_atoms(variables: list[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else env[v] for v in variables]

    for eqn in jaxpr.eqns:
        label, name, atoms = (
            _region_label(eqn) or region,
            eqn.primitive.name,
            read_atoms(eqn.invars),
        )
        called = eqn.params.get("name")
        if name in _INLINED and called not in KERNELS:
            inner = _called_jaxpr(eqn.params, "jaxpr", "call_jaxpr", "fun_jaxpr")
            results = _inline_jaxpr(inner, [*_new_values(inner.constvars), *atoms], label, nodes)
        elif name == "add" and (term := _sum_without_zeros(atoms, eqn.outvars[0].aval)) is not None:
            results = [term]
        else:
            results = _new_values(eqn.outvars)
            if name == "broadcast_in_dim":
                results[0].is_zeros = _is_zero(atoms[0])
            node = PrimitiveNode(
                called if called in KERNELS else name, atoms, results, eqn.params, label
            )
            node.branches = [
                flatten_jaxpr(_without_constants(b), label) for b in eqn.params.get("branches", ())
            ]
            if name in ("scan", "while"):
                body = flatten_jaxpr(_called_jaxpr(eqn.params, "jaxpr", "body_jaxpr"), label)
                node.bodies = [(body, eqn.params.get("length", 1))]
            nodes.append(node)
        env.update(zip(eqn.outvars, results, strict=True))
    return read_atoms(jaxpr.outvars)


def _sum_without_zeros(atoms: list[Any], total: Any) -> Any:
    """Returns the other term of a sum with zeros, which XLA folds away; None if neither is zero."""
    terms = [atom for atom in atoms if not _is_zero(atom)]
    return terms[0] if len(terms) == 1 and terms[0].aval.shape == total.shape else None


def _is_zero(atom: Any) -> bool:
    """True if all elements of a value or literal are known to be zero."""
    if isinstance(atom, PrimitiveValue):
        return atom.is_zeros
    return bool(np.ndim(atom.val) == 0 and atom.val == 0)


def _called_jaxpr(params: dict[str, Any], *names: str) -> Any:
    """Returns the jaxpr that a primitive calls, from the first parameter in `names` that it has."""
    return next(_without_constants(params[name]) for name in names if name in params)


def _without_constants(function: Any) -> Any:
    return getattr(function, "jaxpr", function)


def _region_label(eqn: Any) -> str:
    """Returns the label of the innermost region (`popxl.plan.part`) of an equation."""
    scopes = str(eqn.source_info.name_stack).split(f"{PART_SCOPE}<")
    return scopes[-1].partition(">")[0] if len(scopes) > 1 else ""
