"""Modules: classes whose `build` adds ops to a graph, with variables as named inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args

import popxl
from popxl import Ir, ReplicaGrouping, Tensor, dtypes
from popxl.transforms import GradGraphInfo
from popxl_addons.dot_tree import split_valid_key
from popxl_addons.grad_info import fwd, fwd_grad, make_grad_graph_info
from popxl_addons.graph import Aux, GraphWithNamedArgs, VarGrad
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import OrderedDict, duplicate_items, overrides
from popxl_addons.variable_factory import (
    DataIter,
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)

if TYPE_CHECKING:
    from popxl_addons.graph_cache import GraphCache

Tensors = None | Tensor | Iterable[Tensor]
InliningError = Literal["error", "warning", "none"]
ChooseTensors = Callable[[GraphWithNamedArgs], Iterable[Tensor]]


class Module(popxl.Module):
    """Base class of modules. Subclasses define `build`, which adds ops to the current graph.

    Variables are made inputs with `add_variable_input`; `create_graph` returns the graph together
    with factories for them. Modules set as attributes are sub-modules: their variables belong to
    this module too, under the attribute's name, which is also the name scope of their ops.

    Example:
        >>> class Linear(Module):
        ...     def build(self, x):
        ...         w = self.add_variable_input("w", lambda: np.zeros((2, 2)), x.dtype)
        ...         return x @ w
        >>> factories, graph = Linear().create_graph(x)
        >>> graph.bind(factories.init()).call(x)

    Args:
        cache: let `create_graph` return the same graph again for like arguments. Not for modules
            with their own `build_grad`.
        grad_inlining_error: what happens when a module with its own `build_grad` is called
            inside another graph, where that gradient cannot be used: "error" (RuntimeError),
            "warning" (UserWarning), "none".

    Attributes:
        aux: what `build` keeps for `build_grad`, of any type: `self.aux["x"] = x`. It can be read
            only while `build_grad` runs.
        var_grad: gradients of variables by name, set and read only while `build_grad` runs.
        called_graphs_grad_info: gradients of called graphs, used when the graph is differentiated.

    Raises:
        ValueError: another `grad_inlining_error`, or `cache` with `build_grad`.
    """

    # What a subclass that has no variables needs of the base class, whose __init__ it may not call.
    _name_scope: str | None = None
    _graph_cache: GraphCache | None = None
    _creating_graph = False
    grad_inlining_error: InliningError = "error"

    def __init__(
        self,
        cache: bool = False,
        grad_inlining_error: InliningError = "error",
    ) -> None:
        if grad_inlining_error not in get_args(InliningError):
            raise ValueError(
                f"grad_inlining_error must be one of {', '.join(get_args(InliningError))}, not "
                f"{grad_inlining_error!r}"
            )
        if cache and self.implements_grad_graph:
            raise ValueError(
                f"{type(self).__qualname__} has its own build_grad, whose values belong to one "
                "graph: it cannot have a cache"
            )
        self._submodules: dict[str, Module] = {}
        self._name_scope = None
        if cache:
            from popxl_addons.graph_cache import GraphCache

            self._graph_cache = GraphCache()
        self._cached: dict[popxl.Graph, tuple[NamedVariableFactories, GraphWithNamedArgs]] = {}
        self._creating_graph = False
        self.grad_inlining_error = grad_inlining_error
        self.aux = Aux()
        self.var_grad = VarGrad()
        self._clear()

    def _clear(self) -> None:
        """Forget the variables of the last build, of this module and its submodules."""
        self._factories = NamedVariableFactories()
        self._args = NamedTensors()
        self.called_graphs_grad_info: dict[popxl.Graph, GradGraphInfo] = {}
        for module in self._submodules.values():
            module._clear()

    # ---- sub-modules ----------------------------------------------------------------------------
    def __setattr__(self, key: str, value: Any) -> None:
        if isinstance(value, Module):
            if "_submodules" not in self.__dict__:
                raise AttributeError(
                    f"{type(self).__qualname__} must call super().__init__() before it sets "
                    f"the sub-module {key!r}"
                )
            self._submodules[key] = value
            value.set_name_scope(key)
        elif key in self.__dict__.get("_submodules", {}):
            del self._submodules[key]
        super().__setattr__(key, value)

    def set_name_scope(self, name: str) -> None:
        """Put the ops of this module's inline calls in the name scope `name`."""
        self._name_scope = name
        if not overrides(type(self), popxl.Module, "build"):
            # A list is never called itself: its members have to carry its scope.
            for key, module in self._submodules.items():
                module.set_name_scope(f"{name}/{key}")

    @classmethod
    def from_list(cls, sub_modules: list[Module]) -> Any:
        """Create a module that contains other modules, accessed as `layers[0]` or by iteration."""
        self = cls()
        for i, module in enumerate(sub_modules):
            setattr(self, str(i), module)
        return self

    @classmethod
    def from_variable_factories(cls, inputs: list[VariableFactory]) -> Any:
        """Create a module with a variable input of the current graph for each of the factories."""
        self = cls()
        for i, factory in enumerate(inputs):
            self.add_variable_factory(factory, str(i))
        return self

    def get(self, key: str | int) -> Any:
        """Return the submodule or variable input of a name; raises KeyError if there is none."""
        name = str(key)
        return self._submodules[name] if name in self._submodules else self._args.get(name)

    def __getitem__(self, item: str | int) -> Any:
        return self.get(item)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the submodules, or over variable inputs if there are no submodules."""
        return iter(self._submodules.values() if self._submodules else self._args.tensors)

    def named_children(self) -> dict[str, Module]:
        """Return the submodules by name."""
        return dict(self._submodules)

    # ---- variables ------------------------------------------------------------------------------
    def add_variable_factory(
        self, variable_f: VariableFactory, name: str | None = None
    ) -> popxl.Tensor:
        """Add an input to the current graph for a variable that `variable_f` makes."""
        name = name or variable_f.name
        if name is None:
            raise ValueError("a variable factory without a name needs one")
        self._check_name_is_new(name, overwrite=False)
        variable_f.name = variable_f.name or name
        return self._register(name, variable_f.create_input(), variable_f)

    def register_hidden_variable(self, variable_f: VariableFactory, name: str) -> None:
        """Register a variable that this module uses but that is not an input of a graph.

        It is made, stored and saved with the others, for what happens between calls.

        Raises:
            KeyError: the module has a variable of that name already.
            ValueError: the factory is for variables that graphs take.
        """
        if variable_f.is_input:
            raise ValueError(f"variable {name!r} is an input of graphs: use add_variable_factory")
        self._check_name_is_new(name, overwrite=False)
        self._factories.insert(name, variable_f)

    def add_variable_input(
        self,
        name: str,
        data_iter: DataIter,
        dtype: dtypes.dtype | None = None,
        by_ref: bool = False,
        replica_grouping: ReplicaGrouping | None = None,
        overwrite: bool = False,
    ) -> popxl.Tensor:
        """Add a graph input for a variable, to the current graph.

        Args:
            name: of the variable in this module.
            data_iter: data of the variables, one item for each replica group, see
                `VariableFactory`.
            dtype: element type; default: that of the data.
            by_ref: let changes of the input reach the variable.
            replica_grouping: replicas that share a value; default: all.
            overwrite: replace a variable of that name.

        Raises:
            ValueError: the module has a variable of that name already.
        """
        self._check_name_is_new(name, overwrite)
        made = add_variable_input(name, data_iter, dtype, by_ref, replica_grouping)
        return self._register(name, *made)

    def add_replica_sharded_variable_input(
        self,
        name: str,
        data_iter: DataIter,
        dtype: dtypes.dtype | None = None,
        by_ref: bool = False,
        replica_grouping: ReplicaGrouping | None = None,
        shard_over: int | None = None,
    ) -> popxl.Tensor:
        """Add a graph input for one replica's shard of a variable; see `add_variable_input`.

        Args:
            data_iter: data of the whole variable.
            shard_over: number of parts; default: the size of the replica groups.
        """
        self._check_name_is_new(name, overwrite=False)
        made = add_replica_sharded_variable_input(
            name, data_iter, dtype, by_ref, replica_grouping, shard_over
        )
        return self._register(name, *made)

    def add_variable_inputs(
        self, name: str | int, variable_f: NamedVariableFactories, overwrite: bool = False
    ) -> NamedTensors:
        """Add all variables of another graph as inputs of the current graph, named under `name`.

        Returns:
            The inputs, to bind that graph to.
        """
        name = str(name)
        self._check_name_is_new(name, overwrite)
        factories = variable_f.inputs.to_dict()
        inputs = NamedTensors.from_dict({n: f.create_input(name) for n, f in factories.items()})
        self._factories.insert(name, variable_f.copy(), overwrite=True)
        self._args.insert(name, inputs, overwrite=True)
        return inputs.copy()

    def _check_name_is_new(self, name: str, overwrite: bool) -> None:
        split_valid_key(name)
        if name in self._factories and not overwrite:
            raise ValueError(
                f"module {type(self).__qualname__} has a variable {name!r} already: to use a "
                "module twice in a graph create its graph once and call it twice, or make two "
                "modules; overwrite=True replaces the variable"
            )

    def _register(self, name: str, t: popxl.Tensor, factory: VariableFactory) -> popxl.Tensor:
        self._factories.insert(name, factory, overwrite=True)
        self._args.insert(name, t, overwrite=True)
        return t

    def _collect_variables(
        self, prefix: str = ""
    ) -> Iterator[tuple[str, Tensor | None, VariableFactory]]:
        """Yield name, graph input (None if hidden) and factory of this module's variables.

        Those of this module and its submodules.
        """
        tensors = self._args.to_dict()
        for name, factory in self._factories.to_dict().items():
            yield prefix + name, tensors.get(name), factory
        for name, module in self._submodules.items():
            yield from module._collect_variables(f"{prefix}{name}.")

    def _collect_grad_infos(self) -> dict[popxl.Graph, GradGraphInfo]:
        infos = dict(self.called_graphs_grad_info)
        for module in self._submodules.values():
            infos.update(module._collect_grad_infos())
        return infos

    # ---- graphs ---------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the module inline, in the current graph."""
        if self._creating_graph:
            self._creating_graph = False
            return self.build(*args, **kwargs)
        if self.implements_grad_graph:
            self._warn_about_inlining()
        scope = popxl.name_scope(self._name_scope) if self._name_scope else nullcontext()
        with scope:
            return self.build(*args, **kwargs)

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Create a graph of this module; arguments as for `ir.create_graph`.

        Returns:
            Factories of the variables, and the graph whose arguments have the variables' names.
        """
        cache = self._graph_cache
        if cache is None:
            return self._build_graph(popxl.gcg().ir.create_graph, args, kwargs)
        graph = cache.find_graph(self, *args, **kwargs)
        if graph is None:
            made = self._build_graph(cache.create_graph, args, kwargs)
            graph = made[1].graph
            self._cached[graph] = made
        factories, named = self._cached[graph]
        return factories.copy(), named.copy()

    def _build_graph(
        self, create: Callable[..., popxl.Graph], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        self._clear()
        self.aux = Aux()
        self._creating_graph = True
        try:
            return self._collect_build_variables(create(self, *args, **kwargs))
        finally:
            self._creating_graph = False
            # So that a parent that calls this graph does not own its variables too.
            self._clear()

    def _collect_build_variables(
        self, graph: popxl.Graph
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Collect the variables after a build, in the order of the graph's inputs."""
        position: dict[Tensor | None, int] = {t: i for i, t in enumerate(graph.inputs)}
        position[None] = len(position)  # variables that are no inputs come last
        variables = sorted(self._collect_variables(), key=lambda item: position[item[1]])
        args = NamedTensors.from_dict({name: t for name, t, _ in variables if t is not None})
        factories = NamedVariableFactories.from_dict({name: f for name, _, f in variables})
        graph._gradient_is_written = self.implements_grad_graph
        infos = self._collect_grad_infos()
        for called in _reachable_graphs(graph):
            infos.update(called._written_gradients)
        graph._written_gradients = dict(infos)
        named = GraphWithNamedArgs(
            graph, args, from_module=self, aux=self.aux, called_graphs_grad_info=infos
        )
        return factories, named

    def call_module(
        self,
        module: Module,
        name: str | None = None,
        autodiff: Literal["auto", "build_grad", "autodiff", "none"] = "auto",
        grads_provided: ChooseTensors | None = None,
        grads_required: ChooseTensors | None = None,
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Call another module as a graph of its own, with its own gradient graph.

        Args:
            name: of its variables in this module; default: the attribute it was set as.
            autodiff: what gradient graph is made now, and used when this module's graph is
                differentiated: "auto": the module's own `build_grad`, if it has one; "build_grad"
                or "autodiff": see `GraphWithNamedArgs.autodiff`; "none": none. A module without
                `build_grad` needs none: the transform differentiates what a graph calls.
            grads_provided, grads_required: choose tensors of the created graph for that.

        Returns:
            A function that takes the arguments of `module.build` and returns the tuple of its
            outputs: `(y,) = self.call_module(self.linear)(x)`.
        """
        # The scope of a list's member is "list/0", and its name "list.0".
        scope = name or (module._name_scope or type(module).__name__).replace("/", ".")

        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            factories, graph = module.create_graph(*args, **kwargs)
            number_of_outputs = len(graph.graph.outputs)
            has_variables = factories.len() > 0
            variables = self.add_variable_inputs(scope, factories) if has_variables else None
            if autodiff in ("build_grad", "autodiff") or (
                autodiff == "auto" and module.implements_grad_graph
            ):
                grad = graph.autodiff(
                    grads_provided(graph) if grads_provided else None,
                    grads_required(graph) if grads_required else None,
                    method=autodiff,
                )
                self.called_graphs_grad_info[graph.graph] = grad.grad_graph_info
            outputs = graph.bind(variables).call(
                *_flatten_tensors(args), *_flatten_tensors(kwargs.values())
            )
            return outputs[:number_of_outputs]

        return call

    # ---- gradients written by hand --------------------------------------------------------------
    @property
    def implements_grad_graph(self) -> bool:
        """True if the class overrides `build_grad`."""
        return overrides(type(self), Module, "build_grad")

    def build_grad(self, *args: Any, **kwargs: Any) -> Tensor | Iterable[Tensor | None] | None:
        """Build the gradient of `build` by hand; optional, for subclasses.

        It gets the gradient of each provided output, finds in `self.aux` what `build` kept there,
        puts the gradients of variables into `self.var_grad`, and returns those of the required
        inputs that are no variables, in order, with None where there is none.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no `build_grad`")

    def create_grad_graph(
        self,
        fwd_graph: GraphWithNamedArgs,
        grads_provided: Iterable[popxl.Tensor] | None = None,
        grads_required: Iterable[popxl.Tensor] | None = None,
    ) -> GraphWithNamedArgs:
        """Create, with `build_grad`, the gradient graph of a forward graph of this module.

        The forward graph gains an output for each tensor in `self.aux`, in the order of insertion.

        Args:
            grads_provided: outputs whose gradients are given; default: those of `build`.
            grads_required: inputs whose gradients are wanted; default: all.

        Returns:
            A graph that takes the given gradients, then each tensor that `build_grad` reads from
            `self.aux`, in the order of reading; and that returns what `build_grad` does, then the
            gradients of the variables, in the order of `grads_required`.

        Raises:
            TypeError: `build_grad` has parameters that are not positional.
            ValueError: `grads_provided` or `grads_required` are no outputs or inputs, name one
                twice, or do not fit `build_grad`; a required variable gets no gradient;
                `build_grad` returns more or fewer gradients than there are required inputs, or one
                of another shape.
        """
        from popxl_addons.custom_gradient import build_custom_gradient

        try:
            return build_custom_gradient(self, fwd_graph, grads_provided, grads_required)
        finally:
            self._clear()

    @contextmanager
    def _gradient_context(self, aux: Aux, var_grad: VarGrad) -> Iterator[VarGrad]:
        """Context manager that gives `build_grad` its saved values (`aux`) and `var_grad`."""
        kept, self.aux, self.var_grad = self.aux, aux, var_grad
        try:
            yield var_grad
        finally:
            self.aux, self.var_grad = kept, VarGrad()

    def _warn_about_inlining(self) -> None:
        message = (
            f"{type(self).__qualname__} has its own build_grad, which is not used when it is "
            "called inside another graph: use self.call_module(module)(...), or pass "
            "grad_inlining_error='none'"
        )
        if self.grad_inlining_error == "error":
            raise RuntimeError(message)
        if self.grad_inlining_error == "warning":
            warnings.warn(message, UserWarning, stacklevel=3)


def _reachable_graphs(graph: popxl.Graph) -> dict[popxl.Graph, None]:
    """Return all graphs that a run of `graph` can call, directly or not, without itself."""
    reachable: dict[popxl.Graph, None] = {}
    todo = list(graph.called_graphs)
    while todo:
        called = todo.pop()
        if called not in reachable:
            reachable[called] = None
            todo += called.called_graphs
    return reachable


def _flatten_tensors(values: Iterable[Any]) -> list[Any]:
    """Flatten nested lists of arguments; returns their tensors in order."""
    tensors: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(_flatten_tensors(value))
    return tensors


def create_grad_graph_info(
    ir: Ir,
    fwd_graph: popxl.Graph,
    grad_graph: popxl.Graph,
    grad_input_to_fwd_output: OrderedDict[Tensor, Tensor],
    grad_output_to_fwd_input: OrderedDict[Tensor, Tensor],
    fwd_tensors: Mapping[Tensor, Tensor],
) -> GradGraphInfo:
    """Create the `GradGraphInfo` of a hand-written gradient graph.

    Args:
        ir: of both graphs.
        grad_input_to_fwd_output: inputs that are gradients of outputs of the forward graph.
        grad_output_to_fwd_input: for each output the input it is the gradient of.
        fwd_tensors: inputs that are tensors of the forward graph.

    Raises:
        ValueError: an input of the gradient graph is in neither mapping, or one in both.
    """
    twice = duplicate_items([*grad_input_to_fwd_output, *fwd_tensors])
    known = {t: fwd(f) for t, f in fwd_tensors.items()}
    known.update({t: fwd_grad(f) for t, f in grad_input_to_fwd_output.items()})
    unknown = [t for t in grad_graph.inputs if t not in known]
    if twice or unknown:
        raise ValueError(
            f"inputs of gradient graph {grad_graph.id!r} need one meaning each: "
            f"{[t.name for t in unknown]} have none, {[t.name for t in twice]} have two"
        )
    outputs = [fwd_grad(grad_output_to_fwd_input[t]) for t in grad_graph.outputs]
    return make_grad_graph_info(
        grad_graph, fwd_graph, [known[t] for t in grad_graph.inputs], outputs
    )
