"""Modules: graphs written as classes, whose variables become named inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import popxl
from popxl import Ir, ReplicaGrouping, Tensor, dtypes
from popxl.transforms import GradGraphInfo
from popxl_addons.dot_tree import sanitise
from popxl_addons.grad_info import fwd, fwd_grad, make_grad_graph_info
from popxl_addons.graph import Aux, GraphWithNamedArgs
from popxl_addons.graph_cache import GraphCache
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import OrderedDict, duplicate_items, overrides
from popxl_addons.variable_factory import (
    DataIter,
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)
from popxl_addons.written_gradient import written_gradient

logger = logging.getLogger(__name__)

Tensors = None | Tensor | Iterable[Tensor]
ChooseTensors = Callable[[GraphWithNamedArgs], Iterable[Tensor]]


class Module(popxl.Module):
    """A piece of a model. Subclasses write `build`, which adds ops to the current graph.

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
        cache: let `create_graph` return the same graph again for like arguments.
        grad_inlining_error: what happens when a module with its own `build_grad` is called
            inside another graph, where that gradient cannot be used: "error", "warning", "none".

    Attributes:
        aux: what `build` keeps for `build_grad`: tensors, or containers of them.
        var_grad: gradients of variables by name, set by `build_grad`.
        called_graphs_grad_info: gradients of called graphs, used when the graph is differentiated.
    """

    def __init__(
        self,
        cache: bool = False,
        grad_inlining_error: Literal["error", "warning", "none"] = "error",
    ) -> None:
        self._submodules: dict[str, Module] = {}
        self._name_scope: str | None = None
        self._graph_cache = GraphCache() if cache else None
        self._cached: dict[popxl.Graph, tuple[NamedVariableFactories, GraphWithNamedArgs]] = {}
        self._creating_graph = False
        self.grad_inlining_error = grad_inlining_error
        self._clear()

    def _clear(self) -> None:
        """Forget what the last build left, here and in the sub-modules."""
        self._factories = NamedVariableFactories()
        self._args = NamedTensors()
        self.aux = Aux()
        self.var_grad = NamedTensors()
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
        """Put the ops of inline calls of this module in the name scope `name`."""
        self._name_scope = name
        if not overrides(type(self), popxl.Module, "build"):
            # A list is never called itself: its members have to carry its scope.
            for key, module in self._submodules.items():
                module.set_name_scope(f"{name}/{key}")

    @classmethod
    def from_list(cls, sub_modules: list[Module]) -> Any:
        """A module that holds others: `layers[0]`, `for layer in layers`."""
        self = cls()
        for i, module in enumerate(sub_modules):
            setattr(self, str(i), module)
        return self

    @classmethod
    def from_variable_factories(cls, inputs: list[VariableFactory]) -> Any:
        """A module that holds inputs for variables, made in the current graph: `inputs[0]`."""
        self = cls()
        for i, factory in enumerate(inputs):
            self.add_variable_factory(factory, str(i))
        return self

    def get(self, key: str | int) -> Any:
        """The sub-module or variable input called `key`. Raises KeyError if there is none."""
        name = sanitise(key)
        return self._submodules[name] if name in self._submodules else self._args.get(name)

    def __getitem__(self, item: str | int) -> Any:
        return self.get(item)

    def __iter__(self) -> Iterator[Any]:
        """The sub-modules, or the variable inputs of a module without sub-modules."""
        return iter(self._submodules.values() if self._submodules else self._args.tensors)

    # ---- variables ------------------------------------------------------------------------------
    def add_variable_factory(
        self, variable_f: VariableFactory, name: str | None = None
    ) -> popxl.Tensor:
        """Add an input for a variable made by `variable_f` to the current graph."""
        name = name or variable_f.name
        if name is None:
            raise ValueError("a variable factory without a name needs one")
        self._check_new(name, overwrite=False)
        variable_f.name = variable_f.name or name
        return self._register(name, variable_f.create_input(), variable_f)

    def keep_variable(self, variable_f: VariableFactory, name: str) -> None:
        """Count a variable among those of this module that no graph takes.

        It is made, stored and saved with the others, for what happens between calls.

        Raises:
            KeyError: the module has a variable of that name already.
            ValueError: the factory is for variables that graphs take.
        """
        if variable_f.is_input:
            raise ValueError(f"variable {name!r} is an input of graphs: use add_variable_factory")
        self._check_new(name, overwrite=False)
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
        """Add an input for a variable to the current graph.

        Args:
            name: of the variable in this module.
            data_iter: data of the variables, one item for each replica group, see
                `VariableFactory`.
            dtype: element type; default: that of the data.
            by_ref: let changes of the input reach the variable.
            replica_grouping: replicas that share a value; default: all.
            overwrite: replace a variable of that name.

        Raises:
            KeyError: the module has a variable of that name already.
        """
        self._check_new(name, overwrite)
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
        """As `add_variable_input`, for a replica's part of a variable.

        Args:
            data_iter: data of the whole variable.
            shard_over: number of parts; default: the size of the replica groups.
        """
        self._check_new(name, overwrite=False)
        made = add_replica_sharded_variable_input(
            name, data_iter, dtype, by_ref, replica_grouping, shard_over
        )
        return self._register(name, *made)

    def add_variable_inputs(
        self, name: str | int, variable_f: NamedVariableFactories, overwrite: bool = False
    ) -> NamedTensors:
        """Add inputs for all variables of another graph, under `name`, to the current graph.

        Returns:
            The inputs, to bind that graph to.
        """
        name = sanitise(name)
        self._check_new(name, overwrite)
        names, factories = variable_f.inputs.unpack()
        inputs = NamedTensors.pack(names, [f.create_input(name) for f in factories])
        self._factories.insert(name, variable_f.copy(), overwrite)
        self._args.insert(name, inputs, overwrite)
        return inputs.copy()

    def _check_new(self, name: str, overwrite: bool) -> None:
        if name in self._factories and not overwrite:
            raise KeyError(
                f"module {type(self).__qualname__} has a variable {name!r} already: to use a "
                "module twice in a graph create its graph once and call it twice, or make two "
                "modules; overwrite=True replaces the variable"
            )

    def _register(self, name: str, t: popxl.Tensor, factory: VariableFactory) -> popxl.Tensor:
        self._factories.insert(name, factory, overwrite=True)
        self._args.insert(name, t, overwrite=True)
        return t

    def _collect(self, prefix: str = "") -> Iterator[tuple[str, Tensor | None, VariableFactory]]:
        """Name, input (if graphs take it) and factory of the variables of this module and its
        sub-modules."""
        tensors = self._args.to_dict()
        for name, factory in self._factories.to_dict().items():
            yield prefix + name, tensors.get(name), factory
        for name, module in self._submodules.items():
            yield from module._collect(f"{prefix}{name}.")

    def _collect_grad_infos(self) -> dict[popxl.Graph, GradGraphInfo]:
        found = dict(self.called_graphs_grad_info)
        for module in self._submodules.values():
            found.update(module._collect_grad_infos())
        return found

    # ---- graphs ---------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build inline, in the current graph."""
        if self._creating_graph:
            self._creating_graph = False
            return self.build(*args, **kwargs)
        if self.implements_grad_graph:
            self._complain_about_inlining()
        scope = popxl.name_scope(self._name_scope) if self._name_scope else nullcontext()
        with scope:
            return self.build(*args, **kwargs)

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Create a graph of this module. Arguments as for `ir.create_graph`.

        Returns:
            Factories of the variables, and the graph whose arguments have the variables' names.
        """
        cache = self._graph_cache
        if cache is None:
            return self._build_graph(popxl.gcg().ir.create_graph, args, kwargs)
        graph = cache.find(self, *args, **kwargs)
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
        self._creating_graph = True
        try:
            return self._finish(create(self, *args, **kwargs))
        finally:
            self._creating_graph = False
            self._clear()  # so that a parent that calls this graph does not own its variables too

    def _finish(self, graph: popxl.Graph) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Take what the build left: variables in the order of the graph's inputs."""
        position: dict[Tensor | None, int] = {t: i for i, t in enumerate(graph.inputs)}
        position[None] = len(position)  # variables that are no inputs come last
        found = sorted(self._collect(), key=lambda item: position[item[1]])
        args = NamedTensors.from_dict({name: t for name, t, _ in found if t is not None})
        factories = NamedVariableFactories.from_dict({name: f for name, _, f in found})
        named = GraphWithNamedArgs(
            graph,
            args,
            from_module=self,
            aux=self.aux,
            called_graphs_grad_info=self._collect_grad_infos(),
        )
        return factories, named

    def call_module(
        self,
        module: Module,
        name: str | None = None,
        autodiff: Literal["auto", "build_grad", "autodiff", "none"] = "auto",
        grads_provided: ChooseTensors | None = None,
        grads_required: ChooseTensors | None = None,
    ) -> Callable[..., Any]:
        """Call a module as a graph of its own, with its own gradient graph.

        Args:
            name: of its variables in this module; default: the attribute it was set as.
            autodiff: how its gradient is made, see `GraphWithNamedArgs.autodiff`; "none": not now.
            grads_provided, grads_required: choose tensors of the created graph for that.

        Returns:
            A function that takes the arguments of `module.build` and returns its outputs:
            `y = self.call_module(self.linear)(x)`.
        """
        scope = name or module._name_scope or type(module).__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            factories, graph = module.create_graph(*args, **kwargs)
            number_of_outputs = len(graph.graph.outputs)
            variables = self.add_variable_inputs(scope, factories)
            if autodiff != "none":
                grad = graph.autodiff(
                    grads_provided(graph) if grads_provided else None,
                    grads_required(graph) if grads_required else None,
                    method=autodiff,
                )
                self.called_graphs_grad_info[graph.graph] = grad.grad_graph_info
            outputs = graph.bind(variables).call(*_tensors(args), *_tensors(kwargs.values()))
            chosen = outputs[:number_of_outputs]
            return chosen[0] if number_of_outputs == 1 else chosen or None

        return call

    # ---- gradients written by hand --------------------------------------------------------------
    @property
    def implements_grad_graph(self) -> bool:
        """Whether the class has its own `build_grad`."""
        return overrides(type(self), Module, "build_grad")

    def build_grad(self, *args: Any, **kwargs: Any) -> Tensors:
        """The gradient of `build`, written by hand.

        It gets the gradient of each output, finds in `self.aux` what `build` kept there, puts the
        gradients of variables into `self.var_grad`, and returns those of the other inputs, in
        order, with None where there is none.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no `build_grad`")

    def create_grad_graph(
        self,
        fwd_graph: GraphWithNamedArgs,
        grads_provided: Iterable[popxl.Tensor] | None = None,
        grads_required: Iterable[popxl.Tensor] | None = None,
    ) -> GraphWithNamedArgs:
        """Create the gradient graph of `fwd_graph`, made by this module, with `build_grad`.

        Args:
            grads_provided: outputs whose gradients are given; default: all.
            grads_required: inputs whose gradients are returned, in this order; default: all for
                which `build_grad` gives one.

        Raises:
            ValueError: a required gradient is not given by `build_grad`.
        """
        provided = list(fwd_graph.graph.outputs if grads_provided is None else grads_provided)
        required = None if grads_required is None else list(grads_required)
        try:
            return written_gradient(self, fwd_graph, provided, required)
        finally:
            self._clear()

    def _complain_about_inlining(self) -> None:
        message = (
            f"{type(self).__qualname__} has its own build_grad, which is not used when it is "
            "called inside another graph: use self.call_module(module)(...), or pass "
            "grad_inlining_error='none'"
        )
        if self.grad_inlining_error == "error":
            raise RuntimeError(message)
        if self.grad_inlining_error == "warning":
            logger.warning(message)


def _tensors(values: Iterable[Any]) -> list[Any]:
    """The tensors among arguments, in order; lists are flattened."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


def create_grad_graph_info(
    ir: Ir,
    fwd_graph: popxl.Graph,
    grad_graph: popxl.Graph,
    grad_input_to_fwd_output: OrderedDict[Tensor, Tensor],
    grad_output_to_fwd_input: OrderedDict[Tensor, Tensor],
    fwd_tensors: Mapping[Tensor, Tensor],
) -> GradGraphInfo:
    """Say what a hand-made gradient graph expects and returns.

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
