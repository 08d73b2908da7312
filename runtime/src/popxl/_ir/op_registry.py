"""Op definitions and their registry: lowering, shape inference and gradient of each op.

A *pure* op has `lower`, a JAX function from arrays (and attributes) to arrays, which is its
meaning. Shapes and dtypes follow from it by `jax.eval_shape`, gradients by `jax.vjp`, unless the
definition says otherwise. An op that runs graphs (call, repeat, conditional) has `regions`, which
say all. Another *structural* op (host load, print, ...) has `execute`, which acts on the machine.

In-place variants and views are not separate definitions: an `Op` records which input its result
overwrites (`inplace`), or that its result is a view of its inputs (`view`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl._ir.regions import Region
    from popxl.tensor import Tensor, TensorSpec

InferRule = Callable[..., "Sequence[TensorSpec]"]
GradRule = Callable[..., "Sequence[Tensor | None]"]
NameRule = str | Callable[["Op"], "Sequence[str]"]


@dataclass(frozen=True)
class NoGrad:
    """Gradient rule of an op without a gradient, with the reason; inputs receive none."""

    reason: str


@dataclass(frozen=True)
class RuntimeCheck:
    """A check of an op's input values while the program runs.

    Attributes:
        broken: `broken(*arrays, **attrs) -> bool array of one element`, from an op's inputs.
        rule: condition that must hold; the message of the error.
        option: name of the session option that asks for the check.
    """

    broken: Callable[..., Any]
    rule: str
    option: str


@dataclass(frozen=True, eq=False)
class OpDef:
    """Definition of an op: lowering to JAX, inference, gradient, regions and effects.

    Args:
        name: unique name, shown in the text form.
        lower: lowering to JAX: `lower(*arrays, **attrs) -> array or tuple of arrays`.
        add_to: `add_to(t, *arrays, **attrs)`: t and the only result added up, bit for bit; for ops
            that can add to something sooner than make a result for it.
        infer: `infer(*specs, **attrs) -> [TensorSpec, ...]`; default: from `lower`.
        grad: `grad(ctx, op, *output_grads) -> [gradient or None of each input]`, adding ops to the
            gradient graph; `output_grads` has None where no gradient flows. Default: a vjp of
            `lower`. `NoGrad` if there is none.
        execute: for structural ops, instead of `lower`: `execute(machine, node, arrays)`, which
            returns the results; see `popxl._analysis.tracer_protocol`.
        view_write: for ops usable as views: `view_write(inputs, value, **attrs) -> new inputs`,
            arrays in, tuple of arrays out; stores `value` through the view into its inputs.
        merge: for such ops of one input: `merge(first, then) -> (definition, attrs) or None`, of
            one op that is the view `then` of the view `first`.
        dtypes: "same": all inputs must have one dtype; "any": no rule beyond `infer`.
        regions: for ops that run graphs: `regions(op) -> [Region]`, what they run.
        is_identity: `same(op) -> bool`: whether the only output is the only input, unchanged; where
            it is, nothing is computed or copied.
        effects: state the op touches itself: `effects(op) -> Effects`.
        check: for pure ops: a rule on values that a run checks.
        rounds: for updates of variables: `lower` takes a further argument `rounding`, which says
            how its float32 result is rounded to the dtype of the first input.
        max_gradient_inputs: inputs whose "gradient" is no derivative but the largest of something
            observed: of several for one tensor, the largest is taken, and not the sum.
        result: names of the results, before the graph makes them unique; or
            `result(op) -> [name of each]`. `{t}` is the name of the first input, whose
            scopes come first. Default: `<name>_out`, in place `<name>_inplace_out`.
        inplace_result: names of in-place results and views, unless `result` is a function.
        tags: words for tools, such as "elementwise", "collective".
        home: module that defined it; ops of other packages are cached by what they lower to.
    """

    name: str
    lower: Callable[..., Any] | None = None
    add_to: Callable[..., Any] | None = None
    infer: InferRule | None = None
    grad: GradRule | NoGrad | None = None
    execute: Callable[..., Sequence[Any]] | None = None
    view_write: Callable[..., Any] | None = None
    merge: Callable[[Op, Op], tuple[OpDef, Mapping[str, Any]] | None] | None = None
    dtypes: Literal["same", "any"] = "any"
    regions: Callable[[Op], Iterable[Region[Any]]] | None = None
    is_identity: Callable[[Op], bool] | None = None
    effects: Callable[[Op], Any] | None = None
    check: RuntimeCheck | None = None
    rounds: bool = False
    max_gradient_inputs: tuple[int, ...] = ()
    result: NameRule = ""
    inplace_result: NameRule = ""
    tags: frozenset[str] = field(default_factory=frozenset)
    home: str = ""

    def __post_init__(self) -> None:
        if self.lower is not None and self.execute is not None:
            raise ValueError(f"op {self.name!r} has both `lower` and `execute`")
        if self.lower is self.execute is self.regions is None:
            raise ValueError(f"op {self.name!r} needs one of `lower`, `execute` and `regions`")

    def result_names(self, op: Op, count: int) -> Sequence[str]:
        """Returns the names of an op's `count` results, before they are made unique."""
        in_place = op.inplace is not None or op.view
        rule = self.inplace_result if in_place else self.result
        names = (rule,) * count if isinstance(rule, str) else rule(op)
        if not names or "{t}" not in names[0]:
            return names
        t, graph_scopes = op.inputs[0]._name, op.graph._scopes
        if graph_scopes:  # the graph puts these scopes in front of every name
            t = t.removeprefix("/".join(graph_scopes) + "/")
        scopes, slash, base_name = t.rpartition("/")
        return [scopes + slash + name.replace("{t}", base_name) for name in names]

    def __repr__(self) -> str:
        return f"OpDef({self.name})"


_REGISTRY: dict[str, OpDef] = {}


def define(name: str, lower: Callable[..., Any] | None = None, **kwargs: Any) -> OpDef:
    """Registers an op definition and returns it.

    Arguments as for `OpDef`; `tags` is any iterable.

    `home` is the calling module; a function that defines ops for another module passes its name.
    """
    kwargs.setdefault("home", sys._getframe(1).f_globals.get("__name__", ""))
    if name in _REGISTRY:
        raise ValueError(f"op {name!r} is defined twice")
    kwargs["tags"] = frozenset(kwargs.get("tags", ()))
    kwargs.setdefault("inplace_result", kwargs.get("result", f"{name}_inplace_out"))
    kwargs.setdefault("result", f"{name}_out")
    _REGISTRY[name] = OpDef(name, lower, **kwargs)
    return _REGISTRY[name]


def registry() -> Mapping[str, OpDef]:
    """Returns all registered op definitions, by op name."""
    return dict(_REGISTRY)
