"""A traced function as a list of primitives: functions that it calls are inlined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from popxl._lower.machine import PART
from popxl.ops.fused_attention import KERNELS

_INLINED = frozenset("pjit jit closed_call core_call remat checkpoint custom_jvp_call "
                     "custom_vjp_call custom_vjp_call_jaxpr custom_lin".split())  # fmt: skip


@dataclass(eq=False)
class Node:
    """A primitive.

    Attributes:
        name: JAX's name of it, or that of a function that is one kernel.
        inputs, outputs: variables of JAX, without constants.
        atoms: all operands.
        params: as in JAX.
        part: label of the part of the program it belongs to; "": that of what runs the function.
        bodies: what it runs, and how often.
        branches: what it runs one of.
    """

    name: str
    atoms: list[Any]
    outputs: list[Any]
    params: dict[str, Any]
    part: str
    bodies: list[tuple[Flat, int]] = field(default_factory=list)
    branches: list[Flat] = field(default_factory=list)

    @property
    def inputs(self) -> list[Any]:
        return [v for v in self.atoms if not hasattr(v, "val")]

    @property
    def runs_others(self) -> bool:
        return bool(self.bodies or self.branches)


@dataclass(eq=False)
class Flat:
    """A function.

    Attributes:
        nodes: in the order of the program.
        inputs: arguments and constants.
        results: what it returns; constants may be among it.
    """

    nodes: list[Node]
    inputs: list[Any]
    results: list[Any]

    @property
    def outputs(self) -> list[Any]:
        """The results that are no constants."""
        return [v for v in self.results if _is_variable(v)]


def flatten(jaxpr: Any, part: str = "") -> Flat:
    """The primitives of a jaxpr, those of called functions in their place."""
    nodes: list[Node] = []
    same: dict[Any, Any] = {}
    _append(jaxpr, part, nodes, same)
    flat = Flat(
        nodes, [*jaxpr.constvars, *jaxpr.invars], [_resolve(v, same) for v in jaxpr.outvars]
    )
    flat.nodes = _needed(nodes, flat.outputs)
    return flat


def _needed(nodes: list[Node], outputs: list[Any]) -> list[Node]:
    """The nodes whose results reach `outputs`, or that have none."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if not node.outputs or not wanted.isdisjoint(node.outputs):
            wanted.update(_needed_inputs(node, wanted))
            kept.append(node)
    return kept[::-1]


def _needed_inputs(node: Node, wanted: set[Any]) -> list[Any]:
    """What a node takes to make the outputs that are wanted; leaves out of a loop what it carries
    on for nothing."""
    if node.name != "scan":
        return node.inputs
    ((body, count),) = node.bodies
    consts, carry = node.params["num_consts"], node.params["num_carry"]
    into, out = body.inputs[-len(node.atoms) :], body.results
    keep = {i for i, v in enumerate(node.outputs) if v in wanted}
    while True:
        results = [out[i] for i in keep if _is_variable(out[i])]
        needed = _needed(body.nodes, results)
        used = {v for n in needed for v in n.inputs} | set(results)
        more = {i for i in range(carry) if into[consts + i] in used} - keep
        if not more:
            break
        keep |= more
    node.bodies = [(Flat(needed, body.inputs, results), count)]
    dropped = {consts + i for i in range(carry)} - {consts + i for i in keep}
    return [v for i, v in enumerate(node.atoms) if _is_variable(v) and i not in dropped]


def _is_variable(v: Any) -> bool:
    return not hasattr(v, "val")


def _resolve(v: Any, same: dict[Any, Any]) -> Any:
    while _is_variable(v) and v in same:
        v = same[v]
    return v


def _append(jaxpr: Any, part: str, nodes: list[Node], same: dict[Any, Any]) -> None:
    for eqn in jaxpr.eqns:
        label = _part_of(eqn) or part
        atoms = [_resolve(v, same) for v in eqn.invars]
        if eqn.params.get("name") in KERNELS:
            nodes.append(Node(eqn.params["name"], atoms, list(eqn.outvars), eqn.params, label))
            continue
        if eqn.primitive.name in _INLINED:
            inner = next(iter(_functions(eqn.params)))
            # A function may be called twice: its variables are renamed by what they stand for, so
            # each call must be its own copy.
            inner = _renamed(inner)
            same.update(zip(inner.invars, atoms, strict=True))
            _append(inner, label, nodes, same)
            same.update(zip(eqn.outvars, (_resolve(v, same) for v in inner.outvars), strict=True))
            continue
        node = Node(eqn.primitive.name, atoms, list(eqn.outvars), eqn.params, label)
        if branches := eqn.params.get("branches"):
            node.branches = [flatten(_open(b), label) for b in branches]
        elif eqn.primitive.name in ("scan", "while"):
            count = eqn.params.get("length", 1)
            body = eqn.params.get("jaxpr") or eqn.params.get("body_jaxpr")
            node.bodies = [(flatten(_open(body), label), count)]
        nodes.append(node)


def _functions(params: dict[str, Any]) -> Iterator[Any]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            yield _open(params[name])


def _open(function: Any) -> Any:
    return getattr(function, "jaxpr", function)


@dataclass
class _Copy:
    """A jaxpr with variables of its own."""

    eqns: Sequence[Any]
    invars: list[Any]
    constvars: list[Any]
    outvars: list[Any]


@dataclass(eq=False)
class _Variable:
    aval: Any


@dataclass
class _Equation:
    primitive: Any
    invars: list[Any]
    outvars: list[Any]
    params: dict[str, Any]
    source_info: Any


def _renamed(jaxpr: Any) -> _Copy:
    new: dict[Any, Any] = {}

    def rename(v: Any) -> Any:
        return new.setdefault(v, _Variable(v.aval)) if _is_variable(v) else v

    def names(atoms: Sequence[Any]) -> list[Any]:
        return [rename(v) for v in atoms]

    eqns = [
        _Equation(e.primitive, names(e.invars), names(e.outvars), e.params, e.source_info)
        for e in jaxpr.eqns
    ]
    return _Copy(eqns, names(jaxpr.invars), names(jaxpr.constvars), names(jaxpr.outvars))


def _part_of(eqn: Any) -> str:
    """The innermost part that the op of an equation was written in (see `Machine`)."""
    scopes = str(eqn.source_info.name_stack).split(f"{PART}<")
    return scopes[-1].partition(">")[0] if len(scopes) > 1 else ""
