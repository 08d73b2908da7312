"""A phase: one kind of layer, forwards, backwards and in the optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple

import popxl
import popxl_addons as addons
from modelling.layers.wrapped import ByName, kind_of
from modelling.phases.buffers import Port
from modelling.phases.fp8_state import FP8State
from modelling.phases.gradient_sums import GradientSums
from modelling.phases.optimizer import OptimizerStore, weighted_squares
from modelling.phases.settings import Settings
from modelling.phases.state import VariableStore
from modelling.phases.step import StepInputs, Update
from popxl import ops
from popxl.ops.random import create_random_seed
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.rts import reduce_replica_sharded_graph
from popxl_addons.transforms.batch_serialisation import (
    batch_serialise,
    batch_serialise_fwd_and_grad,
)
from popxl_addons.variable_factory import NamedVariableFactories

_SEED = "seed"  # name of a gradient graph's seed among its arguments


class LastLayers(NamedTuple):
    """The last layers of a kind.

    Attributes:
        first: of them.
        others: name of the phase of the others, whose seeds they go on with.
    """

    first: int
    others: str


class Phase:
    """A layer's graphs, and its variables for each of `entries` layers of its kind.

    The forward graph is called for all micro-batches of a step in a loop, with variables loaded
    once before it; so is the gradient graph, which adds up gradients. It computes the layer's
    activations again, or finds them in remote buffers (`execution.activations`).

    Attributes:
        layer: the module's class, which layers of a kind have in common.
        names: of the variables that the phase loads, own and borrowed.
        trained: those of them that the program trains: they alone have gradients, accumulators and
            optimizer state, and are written back (`modelling.weights.WeightMapping.trained`).
        bwd: the gradient graph; None where nothing in or before the phase is trained.
        kept: how many of its layers, the last ones, are to keep their activations.

    Args:
        module: the layer; `build(<inputs>, seed=None)` returns a tensor for each output.
        inputs: its inputs, by the names of `build`'s parameters.
        outputs: its outputs; the specs may be left to the graph. Empty if that is the loss.
        entries: number of layers of this kind.
        shared: variables, by name in the module's tree, that another phase owns; as name -> phase.
            The name of a tree of variables stands for all of them, "" for all variables.
        weights_of: a phase of as many layers that has the same variables and keeps them; the caller
            decides in which of the two it runs a layer.
        last: layers that keep their activations, where `weights_of` runs others that do not.
    """

    _owner: dict[str, Phase]  # of borrowed variables
    _optim: popxl.Graph  # the update of a layer
    _updated: list[str]  # what it returns, by name

    def __init__(
        self,
        name: str,
        module: addons.Module,
        inputs: Mapping[str, Port],
        outputs: Sequence[Port],
        settings: Settings,
        entries: int = 1,
        shared: Mapping[str, Phase] | None = None,
        weights_of: Phase | None = None,
        last: LastLayers | None = None,
    ) -> None:
        self.name, self.entries, self._settings = name, entries, settings
        self._module, self._inputs, self._outputs = module, inputs, outputs
        self.kept = settings.layers_kept(name, entries)
        self._keeps = last is not None or self.kept == entries
        self._first, self._tag = (0, name) if last is None else (last.first, last.others)
        self.layer = kind_of(module)
        self._keeper, self.keeps_variables = weights_of or self, weights_of is None
        specs = [port.spec for port in inputs.values()]
        by_name = ByName(module, list(inputs))
        self._facts, forward = by_name.create_graph(*specs, seed=settings.seed_spec)
        self.names = [n for n in forward.args.keys_flat() if self._facts.get(n).kind == "parameter"]
        self._owner = self._owners(shared or {}) if weights_of is None else weights_of._owner
        self.trained = [n for n in self.names if self._trains(n)]
        self.bwd: addons.GraphWithNamedArgs | None = None
        if self.trained or (settings.training and any(port.grad for port in inputs.values())):
            self._build_graphs(forward)
        else:
            self._build_forward(forward)
        if weights_of is None:
            self._own()
        else:
            self._share(weights_of)

    def keeping(self) -> Phase:
        """A phase with the same variables that runs the last `kept` layers, which keep their
        activations."""
        last = LastLayers(self.entries - self.kept, self.name)
        layer = self._module, self._inputs, self._outputs, self._settings, self.entries
        return Phase(f"{self.name}_kept", *layer, weights_of=self._keeper, last=last)

    def _owners(self, shared: Mapping[str, Phase]) -> dict[str, Phase]:
        """The phases of variables that this phase borrows, by the variable's name."""
        return {
            name: owner
            for name in self.names
            for prefix, owner in shared.items()
            if not prefix or name == prefix or name.startswith(f"{prefix}.")
        }

    def _trains(self, name: str) -> bool:
        """Whether a variable is trained."""
        settings, owner = self._settings, self._owner.get(name, self._keeper)
        return settings.training and settings.trains(owner.name, name)

    # ---- graphs ---------------------------------------------------------------------------------
    def _build_forward(self, forward: addons.GraphWithNamedArgs) -> None:
        """The forward graph alone: in evaluation, and where nothing up to here is trained."""
        tensors = zip(forward.graph.inputs, self._inputs.values(), strict=False)
        results, settings = forward.graph.outputs, self._settings
        serialised = batch_serialise(
            forward,
            settings.micro_batches_per_pass,
            load_handles={t: port.value for t, port in tensors},
            store_streams=self._streams(results),
            store_buffers={t: port.place for t, port in zip(results, self._outputs, strict=False)},
            seed_input=self._seed_input(forward),
            rows=max(self.entries, 2),
            io_mode="compute",
            numbered=settings.passes > 1,
        )
        self.fwd = serialised.graph

    def _seed_input(self, forward: addons.GraphWithNamedArgs) -> popxl.Tensor | None:
        """The forward graph's input that is a seed."""
        if self._settings.seed_spec is None:
            return None
        return forward.graph.inputs[len(self._inputs)]

    def _streams(
        self, results: Sequence[popxl.Tensor]
    ) -> dict[popxl.Tensor, popxl.DeviceToHostStream]:
        """Streams to the host, by the tensor that goes there."""
        return {}

    def _build_graphs(self, forward: addons.GraphWithNamedArgs) -> None:
        settings, inputs = self._settings, self._inputs
        tensors = dict(zip(inputs, forward.graph.inputs, strict=False))
        seed = self._seed_input(forward)
        with_grad = [tensors[n] for n, port in inputs.items() if port.grad is not None]
        results = dict(zip(forward.graph.outputs, self._outputs, strict=True))
        with popxl.transforms.saving(popxl.transforms.products_saveable):
            self._grad_facts, grad = addons.autodiff_with_accumulation(
                forward,
                self._accumulated(forward),
                grads_provided=[t for t, port in results.items() if port.grad is not None],
                grads_required=with_grad,
                mean=False,
                accumulator_dtype=popxl.float32 if settings.adds_gradients else None,
                adds=settings.adds_gradients,
            )
        # So keeping activations and computing them again give the same bits.
        popxl.transforms.outline(forward.graph, _taken_from_inside(forward, grad))
        popxl.transforms.outline(grad.graph)
        if not self._keeps:
            grad = addons.recompute_graph(grad)
        loads = {tensors[n]: port.value for n, port in inputs.items()}
        for given, result in _gradient_inputs(grad).items():
            gradient = results[result].grad
            assert gradient is not None, "the output of a layer has a gradient"
            loads[given] = gradient
        stores = {t: port.place for t, port in results.items()}
        input_grads = [port.grad for port in inputs.values() if port.grad is not None]
        stores.update(zip(grad.graph.outputs, input_grads, strict=True))
        named = forward.args.copy()
        if seed is not None:  # so it is passed again, not stored with the activations
            named.insert(_SEED, seed)
        fwd, bwd = batch_serialise_fwd_and_grad(
            forward,
            grad,
            named,
            settings.micro_batches_per_pass,
            load_handles=loads,
            store_streams={},
            store_buffers=stores,
            seed_input=seed,
            rows=self.entries,
            io_mode="compute",
            first_row=self._first,
            numbered=settings.passes > 1,
        )
        for handle in fwd.stored_buffers.values():
            handle.buffer.kind = handle.buffer.kind or "activations inside layers"
        self.fwd, self.bwd = fwd.graph, bwd.graph

    def _accumulated(self, forward: addons.GraphWithNamedArgs) -> tuple[popxl.Tensor, ...]:
        """The inputs whose gradients are added up: trained variables, and scales of FP8 products,
        whose gradients are what was observed."""
        frozen = {*self.names} - {*self.trained}
        wanted = [name for name in forward.args.keys_flat() if name not in frozen]
        return forward.args.filter_keys(wanted).tensors

    def _own(self) -> None:
        """Give own variables buffers, and let the phases that keep the others know."""
        settings = self._settings
        parameters = self._facts.of_kind("parameter").to_dict()
        own = {n: f for n, f in parameters.items() if n not in self._owner}
        facts = NamedVariableFactories.from_dict(own)
        trained = [name for name in self.trained if name in own]
        self.variables = (
            VariableStore.create(facts, self.name, self.entries, settings, trained) if own else None
        )
        self.optimizer = (
            OptimizerStore.create(self.variables, self.name, self.entries, settings)
            if self.variables and trained
            else None
        )
        self.fp8 = FP8State.create(self._facts, self.entries, settings)
        if self.optimizer is not None:
            self._build_update()
        self.keep_resident(settings.config.execution.resident_layers)
        self._lent: dict[str, list[Phase]] = {}  # own variables, and who adds to their gradients
        for name, owner in self._owner.items():
            if name in self.trained:
                owner._lent.setdefault(name, []).append(self)
        self._build_reduction()

    def _share(self, other: Phase) -> None:
        """Use the variables, FP8 state and gradients of a phase, and its optimizer."""
        assert self.names == other.names, "phases that are alike have the same variables"
        self.variables, self.fp8, self.optimizer = other.variables, other.fp8, other.optimizer
        self._lent = other._lent
        if self.optimizer is not None:
            self._optim, self._updated = other._optim, other._updated
        self._build_reduction()

    def _build_update(self) -> None:
        """The update of a layer, the same executables wherever in a step it runs."""

        def update(row: popxl.Tensor, norm: popxl.Tensor, rate: popxl.Tensor) -> list[popxl.Tensor]:
            assert self.variables is not None
            assert self.optimizer is not None
            new = self.optimizer.update(self.variables, row, Update(norm, rate))
            if self.fp8:
                new |= self.fp8.update(row, norm)
            self._updated[:] = new
            return list(new.values())

        self._updated = []
        row, scalar = popxl.TensorSpec((), popxl.int32), popxl.TensorSpec((), popxl.float32)
        self._optim = popxl.gir().create_graph(update, row, scalar, scalar)

    def _build_reduction(self) -> None:
        if not self.trained or self.bwd is None:
            return
        settings = self._settings
        groups = {n: self._store_of(n).shard_groups[n] for n in self.trained}
        sums = self._accumulators(self.bwd.args).map(
            lambda t: popxl.TensorSpec(t.shape, popxl.float32, t.meta_shape)
        )
        self._reduce, self._reduced = reduce_replica_sharded_graph(
            sums,
            "mean",
            shard_groups=NamedReplicaGrouping.from_dict(groups),
            replica_group=settings.groups.dp,
        )

    def keep_resident(self, entries: int) -> None:
        """Keep variables, gradients and moments of the first entries on the device."""
        if self.variables and self._settings.training:
            state = [self.optimizer.buffers] if self.optimizer else []
            for tree in (self.variables.buffers, self.variables.grads, *state):
                for buffer in tree.to_dict().values():
                    buffer.resident = min(entries, self.entries)

    def _accumulators(self, args: addons.NamedTensors) -> addons.NamedTensors:
        return addons.NamedTensors.from_dict({n: args.get(f"accum.{n}") for n in self.trained})

    def _store_of(self, name: str) -> VariableStore:
        store = self._owner[name].variables if name in self._owner else self.variables
        assert store is not None
        return store

    def init_variables(self, gradients: bool = False) -> list[addons.NamedTensors]:
        """Create the variables and optimizer state of each layer, with zeros as values.

        Args:
            gradients: also make the gradients readable, as variables.

        Returns:
            For each layer, trees `fwd` (variables, FP8 state among them), in training `optim`
            (optimizer state by variable) and, if asked, `grad` (gradients times
            `RunConfig.gradient_scaling`).
        """
        if not self.variables or not self.keeps_variables:
            return []
        return [self._init_layer(row, gradients) for row in range(self.entries)]

    def _init_layer(self, row: int, gradients: bool) -> addons.NamedTensors:
        assert self.variables is not None
        prefix = f"{self.name}.{row}"
        facts, buffers = self.variables.facts, self.variables.buffers
        fwd = facts.init_remote(buffers, row, prefix, empty=True)
        if self.fp8:
            state = self.fp8.facts.init_remote(self.fp8.buffers, row, prefix)
            fwd = addons.NamedTensors.from_dict({**fwd.to_dict(), **state.to_dict()})
        layer = addons.NamedTensors(fwd=fwd)
        if self.optimizer is not None:
            facts, buffers = self.optimizer.facts, self.optimizer.buffers
            optim = facts.init_remote(buffers, row, f"{prefix}.optim", empty=True)
            layer.insert("optim", optim)
        if gradients:
            layer.insert("grad", self.variables.gradient_variables(row, f"{prefix}.grad"))
        return layer

    # ---- running --------------------------------------------------------------------------------
    def part(self, direction: str) -> AbstractContextManager[Any]:
        """What this phase adds to the program, under a name of its own in plans."""
        return popxl.plan.part(f"{self.name}/{direction}")

    def _load_code(self, graph: popxl.Graph) -> None:
        """Ask for the code of `graph`, if layers' code is to be loaded when it is needed."""
        if self._settings.config.execution.code_load:
            ops.remote_code_load(graph, "executable")

    def _load(self, row: popxl.Tensor, step: StepInputs) -> addons.NamedTensors:
        """Full variables, own and borrowed, and scales, where a pass first needs them.

        An update that is pending is done first; its values are used as they are, not loaded. Where
        the step has several passes, the first one keeps what it gathered for the others.
        """
        if not step.is_first:
            return self._load_again(row)
        new = {} if step.update is None else self.update(row, step.update)
        own: dict[str, popxl.Tensor] = {}
        if self.variables:
            full = self.variables.load_full(row, new)
            if not step.is_last:
                self.variables.keep_full(row, full)
            own = self.variables.dequantized(full).to_dict()
        scales = self.fp8.scales(new or self.fp8.load(row)) if self.fp8 else {}
        return addons.NamedTensors.from_dict({**own, **self._borrowed(), **scales})

    def _load_again(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Variables and scales as `_load` gave them before."""
        own = self._reloaded(self.variables, row) if self.variables else {}
        scales = self.fp8.scales(self.fp8.load(row)) if self.fp8 else {}
        return addons.NamedTensors.from_dict({**own, **self._borrowed(), **scales})

    def _load_for_gradients(self, row: popxl.Tensor, step: StepInputs) -> addons.NamedTensors:
        """Variables and scales for the backward pass."""
        return self._load_again(row)

    def _borrowed(self) -> dict[str, popxl.Tensor]:
        """Full variables of other phases, which came before this one."""
        first, borrowed = popxl.constant(0, popxl.int32), dict[str, popxl.Tensor]()
        for owner in dict.fromkeys(self._owner.values()):
            assert owner.variables is not None
            names = [name for name, of in self._owner.items() if of is owner]
            borrowed |= self._reloaded(owner.variables.of(names), first)
        return borrowed

    def _reloaded(self, store: VariableStore, row: popxl.Tensor) -> dict[str, popxl.Tensor]:
        """Full variables, which were gathered before if there are several passes."""
        full = store.load_kept(row) if self._settings.passes > 1 else store.load_full(row)
        return store.dequantized(full).to_dict()

    def _seed(self, row: popxl.Tensor, step: StepInputs) -> list[popxl.Tensor]:
        """The pass's first micro-batch, where a step has several passes, and the seed of layer
        `row`, the same forwards and backwards."""
        if self._settings.seed_spec is None:
            return []
        assert step.seed is not None
        tag = popxl.constant(_tag(self._tag), popxl.uint32)
        seed = create_random_seed(create_random_seed(step.seed, tag), ops.cast(row, popxl.uint32))
        first = step.first_micro_batch
        return [seed] if first is None else [first, seed]

    def _begins(self, name: str) -> bool:
        """Whether the gradient of a borrowed variable begins with this phase's.

        It does where this phase alone borrows it. The layers of a loop are alike, so all of them
        add to what is there.
        """
        return self.entries == 1 and self._owner[name]._lent[name] == [self]

    def begin_gradients(self) -> None:
        """Let the gradients that other phases add to start from zero, after the last update."""
        for name, borrowers in sorted(self._lent.items()):
            if borrowers[0]._begins(name):
                continue
            buffer = self._store_of(name).grads.get(name)
            zero = ops.init(buffer.tensor_shape, buffer.tensor_dtype, meta_shape=buffer.meta_shape)
            ops.remote_store(buffer, 0, zero)

    def forward(self, row: popxl.Tensor, step: StepInputs) -> None:
        """Run layer `row` on all micro-batches; first its update, if one is pending."""
        with self.part("forward"):
            self._load_code(self.fwd.graph)
            self.fwd.bind(self._load(row, step)).call(row, *self._seed(row, step))

    def backward(self, row: popxl.Tensor, step: StepInputs, squares: popxl.Tensor) -> popxl.Tensor:
        """Run the gradient of layer `row` on the micro-batches of a pass; after the last pass,
        reduce and store gradients.

        Returns:
            `squares`, and this replica's part of the sum of squares of the gradients that are
            complete now.
        """
        if self.bwd is None:
            return squares
        with self.part("backward"):
            self._load_code(self.bwd.graph)
            sums = None if step.is_first else self._keeper._sums
            accumulators = self._grad_facts.init_zero() if sums is None else sums.begin(row)
            values = {**self._load_for_gradients(row, step).to_dict(), **accumulators.to_dict()}
            bound = self.bwd.bind(addons.NamedTensors.from_dict(values))
            # Where activations are kept, so are the masks of dropout: there is no seed to pass.
            takes_seed = self.bwd is self.fwd or _SEED in self.bwd.args
            bound.call(row, *(self._seed(row, step) if takes_seed else []))
            if not step.is_last:
                self._keeper._sums.store(row, accumulators, is_first=step.is_first)
                return squares
            total = accumulators if sums is None else sums.total(row, accumulators)
            return squares + self._finish_gradients(row, total)

    @cached_property
    def _sums(self) -> GradientSums:
        """Buffers of accumulators between passes: for gradients that are stored whole, and that no
        other phase adds to, their own. Known once all phases are there."""
        at_hand, dtype = {}, self._settings.gradient_dtype
        for name in self.trained:
            if name not in self._owner and name not in self._lent:
                buffer = self._store_of(name).grads.get(name)
                if not buffer.meta_shape:
                    at_hand[f"accum.{name}"] = buffer
        dtypes = {f"accum.{name}": dtype for name in self.trained}
        return GradientSums.create(self._grad_facts, at_hand, dtypes, self.entries)

    def _finish_gradients(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors
    ) -> popxl.Tensor:
        if self.fp8:
            self.fp8.observe(row, accumulators)
        if not self.trained:
            return popxl.constant(0.0, popxl.float32)
        outputs = self._reduce.bind(self._accumulators(accumulators)).call()
        reduced = dict(zip(self._reduced, outputs, strict=True))
        complete = {}
        for name, grad in reduced.items():
            foreign = name in self._owner
            buffer = self._store_of(name).grads.get(name)
            at = popxl.constant(0, popxl.int32) if foreign else row
            if name in self._lent or (foreign and not self._begins(name)):
                grad = grad + ops.cast(ops.remote_load(buffer, at), grad.dtype)
            ops.remote_store(buffer, at, addons.rounded_by_hash(grad, buffer.tensor_dtype))
            if not foreign:
                complete[name] = grad
        if not self.variables:
            return popxl.constant(0.0, popxl.float32)
        return weighted_squares(complete, self.variables, self._settings.config.gradient_scaling)

    def update(self, row: popxl.Tensor, update: Update) -> dict[str, popxl.Tensor]:
        """Optimizer step of layer `row`.

        Returns:
            The new variables, as this replica stores them, and FP8 state, by name.
        """
        if self.optimizer is None:
            return {}
        with self.part("update"):
            new = ops.call(self._optim, row, *update.tensors)
        return dict(zip(self._updated, new, strict=True))


def _gradient_inputs(grad: addons.GraphWithNamedArgs) -> dict[popxl.Tensor, popxl.Tensor]:
    """The inputs of a gradient graph for gradients of the layer's outputs, and these outputs."""
    expected = grad.grad_graph_info.expected_inputs
    given = popxl.transforms.ExpectedConnectionType.FwdGrad
    pairs = zip(grad.graph.inputs, expected, strict=False)
    return {t: c.fwd_tensor for t, c in pairs if c.connection_type == given}


def _taken_from_inside(
    forward: addons.GraphWithNamedArgs, grad: addons.GraphWithNamedArgs
) -> list[popxl.Tensor]:
    """What a gradient graph takes from its forward graph, besides inputs."""
    inputs = set(forward.graph.inputs)
    expected = grad.grad_graph_info.expected_inputs
    taken = popxl.transforms.ExpectedConnectionType.Fwd
    tensors = [c.fwd_tensor for c in expected if c.connection_type == taken]
    return [t for t in tensors if t not in inputs]


def _tag(name: str) -> int:
    """A number for the name of a phase, the same in every process."""
    return zlib.crc32(name.encode())
