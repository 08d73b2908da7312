"""Custom gradients: gradient graphs of modules that define `build_grad`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import popxl
from popxl import Tensor
from popxl_addons.grad_info import Connection, fwd, fwd_grad, make_grad_graph_info
from popxl_addons.graph import Aux, GraphWithNamedArgs, VarGrad, check_same_spec
from popxl_addons.utils import duplicate_items, suffix_graph_name

if TYPE_CHECKING:
    from popxl_addons.module import Module


def build_custom_gradient(
    module: Module,
    fwd_graph: GraphWithNamedArgs,
    grads_provided: Iterable[Tensor] | None,
    grads_required: Iterable[Tensor] | None,
) -> GraphWithNamedArgs:
    """Build the gradient graph of a module that defines `build_grad`; see `create_grad_graph`."""
    forward = fwd_graph.graph
    _check_parameters(module)
    provided = _provided_outputs(module, fwd_graph, grads_provided)
    inputs, variables = _required_inputs(fwd_graph, grads_required)
    _expose_saved_values(fwd_graph)
    with forward.ir._new_current_graph(suffix_graph_name(forward.name, "grad")) as graph:
        grads = [_input_like(t, "grad_") for t in provided]
        values = _ForwardValues(fwd_graph._aux)
        with module._gradient_context(values, VarGrad(fwd_graph.args)) as var_grad:
            results = _as_list(module.build_grad(*grads))
        gradients = _check_results(module, inputs, results, all_wanted=grads_required is None)
        missing = [name for name in variables if name not in var_grad]
        if grads_required is not None:
            missing += [t.name for t in inputs if t not in gradients]
        if missing:
            raise ValueError(f"build_grad of {_class_name(module)} gives no gradient of {missing}")
        gradients.update({t: var_grad[name] for name, t in variables.items()})
        for gradient in gradients.values():
            popxl.graph_output(gradient)
    expected = [*map(fwd_grad, provided), *values._connections]
    info = make_grad_graph_info(graph, forward, expected, map(fwd_grad, gradients))
    return GraphWithNamedArgs.from_grad_graph(info)


def _class_name(module: Module) -> str:
    return type(module).__qualname__


def _check_parameters(module: Module) -> None:
    """Raise TypeError unless all parameters of `build_grad` are positional."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for p in inspect.signature(module.build_grad).parameters.values():
        if p.kind not in positional:
            raise TypeError(
                f"build_grad of {_class_name(module)} takes one gradient by each parameter, "
                f"but {p} is not a positional one"
            )


def _check_unique(argument_name: str, tensors: list[Tensor]) -> None:
    if twice := duplicate_items(tensors):
        raise ValueError(f"{argument_name} has {[t.id for t in twice]} twice")


# ---- what is given and wanted -------------------------------------------------------------------
def _provided_outputs(
    module: Module, fwd_graph: GraphWithNamedArgs, requested: Iterable[Tensor] | None
) -> list[Tensor]:
    """Forward outputs whose gradients are inputs of `build_grad`; by default all of `build`."""
    outputs = fwd_graph.graph.outputs
    provided = list(fwd_graph._build_outputs if requested is None else requested)
    if requested is not None:
        _check_unique("grads_provided", provided)
    for t in provided:
        if t not in outputs:
            raise ValueError(f"grads_provided: {t!r} is no output of {fwd_graph.graph.id!r}")
    try:
        inspect.signature(module.build_grad).bind(*provided)
    except TypeError as error:
        raise ValueError(
            f"build_grad of {_class_name(module)} does not take the gradients of "
            f"{len(provided)} outputs ({error}): pass grads_provided"
        ) from None
    return provided


def _required_inputs(
    fwd_graph: GraphWithNamedArgs, requested: Iterable[Tensor] | None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Forward inputs whose gradients are requested: non-variables, and variables by name."""
    required = list(fwd_graph.graph.inputs if requested is None else requested)
    _check_unique("grads_required", required)
    names = {t: name for name, t in fwd_graph.args.to_dict().items()}
    for t in required:
        if t not in fwd_graph.graph.inputs:
            raise ValueError(f"grads_required: {t!r} is no input of {fwd_graph.graph.id!r}")
    return [t for t in required if t not in names], {names[t]: t for t in required if t in names}


# ---- values of the forward graph ----------------------------------------------------------------
def _expose_saved_values(fwd_graph: GraphWithNamedArgs) -> None:
    """Make the tensors that `build` saved in `aux` outputs of the forward graph, once.

    A tensor that was kept itself is an output of its own, after those of `build`, so that gradient
    graphs that programs write by hand find it there. One in a container, which is our extension,
    becomes an output only where there is no other way to it: outputs cost memory.
    """
    graph, aux = fwd_graph.graph, fwd_graph._aux
    if aux._exposed:
        return
    with graph:
        for value in aux._map.values():
            if isinstance(value, Tensor):
                popxl.graph_output(value)
        for t in _tensors_in(aux._map):
            if t not in graph.inputs and t not in graph.outputs:
                popxl.graph_output(t)
    aux._exposed = True


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside nested lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


class _ForwardValues(Aux):
    """`self.aux` inside `build_grad`: the values saved by `build`, as inputs of the gradient graph.

    An input is created when its value is first read.
    """

    def __init__(self, saved_aux: Aux) -> None:
        super().__init__()
        self._map = saved_aux._map
        self._connections: list[Connection] = []  # what the inputs are, in their order
        self._made: dict[Tensor, Tensor] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._map:
            raise KeyError(f"build kept nothing as aux[{key!r}]: {list(self._map)}")
        return self._as_gradient_inputs(self._map[key])

    def __setitem__(self, key: str, value: Any) -> None:
        raise RuntimeError(
            f"aux[{key!r}] is set in build_grad: self.aux brings values from build to build_grad"
        )

    def _as_gradient_inputs(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value not in self._made:
                self._connections.append(fwd(value))
                self._made[value] = _input_like(value, "fwd_")
            return self._made[value]
        if isinstance(value, Mapping):
            return {key: self._as_gradient_inputs(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._as_gradient_inputs(v) for v in value)
        return value


# ---- results ------------------------------------------------------------------------------------
def _check_results(
    module: Module, inputs: Sequence[Tensor], results: Sequence[Tensor | None], all_wanted: bool
) -> dict[Tensor, Tensor]:
    """Return the gradients that `build_grad` returned, by input; inputs without one are left out.

    Where all inputs are wanted, those at the end that can have no gradient, such as a seed, may be
    left out.
    """
    fewest = len(inputs)
    while all_wanted and fewest and not inputs[fewest - 1].dtype.is_floating_point:
        fewest -= 1
    if not fewest <= len(results) <= len(inputs):
        raise ValueError(
            f"build_grad of {_class_name(module)} returns {len(results)} gradients, but those of "
            f"{len(inputs)} inputs that are no variables are required"
        )
    gradients = {t: g for t, g in zip(inputs, results, strict=False) if g is not None}
    for t, g in gradients.items():
        check_same_spec(
            f"the gradient that build_grad of {_class_name(module)} returns for {t.name!r}", g, t
        )
    return gradients


def _input_like(t: Tensor, prefix: str) -> Tensor:
    name = prefix + t.name.replace("/", "_")
    return popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape)


def _as_list(outputs: Any) -> list[Any]:
    if outputs is None or isinstance(outputs, Tensor):
        return [] if outputs is None else [outputs]
    return list(outputs)
