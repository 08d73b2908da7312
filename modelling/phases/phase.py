"""A phase: one kind of layer, forwards, backwards and in the optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple

import popxl
import popxl_addons as addons
from modelling.layers.wrapped import PositionalInputs, layer_class_name
from modelling.phases.buffers import LayerIO
from modelling.phases.fp8_state import FP8State
from modelling.phases.gradient_sums import GradientSums
from modelling.phases.phase_optimizer import PhaseOptimizer, weighted_squares
from modelling.phases.phase_variables import PhaseVariables
from modelling.phases.settings import PhaseSettings
from modelling.phases.step_inputs import StepInputs, UpdateInputs
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


class SavedTail(NamedTuple):
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
            optimizer state, and are written back (`WeightMapping.trainable`).
        bwd: the gradient graph; None where nothing in or before the phase is trained.
        kept: how many of its layers, the last ones, are to keep their activations.

    Args:
        module: the layer; `build(<inputs>, seed=None)` returns a tensor for each output.
        inputs: its inputs, by the names of `build`'s parameters.
        outputs: its outputs; the specs may be left to the graph. Empty if that is the loss.
        entries: number of layers of this kind.
        shared: variables, by name in the module's tree, that another phase owns; as name -> phase.
            The name of a tree of variables stands for all of them, "" for all variables.
        share_weights_with: another phase over the same layers which owns the variables; the
            caller picks one of the two for each layer.
        last: the layers that save their activations, where `share_weights_with` runs the others.
    """

    _owner_of: dict[str, Phase]  # of borrowed variables
    _optim: popxl.Graph  # the update of a layer
    _updated: list[str]  # what it returns, by name

    def __init__(
        self,
        name: str,
        module: addons.Module,
        inputs: Mapping[str, LayerIO],
        outputs: Sequence[LayerIO],
        settings: PhaseSettings,
        entries: int = 1,
        shared: Mapping[str, Phase] | None = None,
        share_weights_with: Phase | None = None,
        last: SavedTail | None = None,
    ) -> None:
        self.name, self.entries, self._settings = name, entries, settings
        self._module, self._inputs, self._outputs = module, inputs, outputs
        self.saved_layers = settings.num_saved_layers(name, entries)
        self._saves_activations = last is not None or self.saved_layers == entries
        self._first, self._seed_name = (0, name) if last is None else (last.first, last.others)
        self.layer = layer_class_name(module)
        self._weights_owner = share_weights_with or self
        self.owns_variables = share_weights_with is None
        specs = [layer_io.spec for layer_io in inputs.values()]
        by_name = PositionalInputs(module, list(inputs))
        self._facts, forward = by_name.create_graph(*specs, seed=settings.seed_spec)
        self.names = [n for n in forward.args.keys_flat() if self._facts.get(n).kind == "parameter"]
        self._owner_of = (
            self._find_owners(shared or {})
            if share_weights_with is None
            else share_weights_with._owner_of
        )
        self.trainable = [n for n in self.names if self._is_trainable(n)]
        self.bwd: addons.GraphWithNamedArgs | None = None
        if self.trainable or (
            settings.training and any(layer_io.grad for layer_io in inputs.values())
        ):
            self._build_graphs(forward)
        else:
            self._build_forward(forward)
        if share_weights_with is None:
            self._create_variables()
        else:
            self._borrow_variables(share_weights_with)

    def saved_tail(self) -> Phase:
        """Another phase with the same variables, for the last `saved_layers` layers, whose
        activations are saved."""
        last = SavedTail(self.entries - self.saved_layers, self.name)
        layer = self._module, self._inputs, self._outputs, self._settings, self.entries
        owner = self._weights_owner
        return Phase(f"{self.name}_saved", *layer, share_weights_with=owner, last=last)

    def _find_owners(self, shared: Mapping[str, Phase]) -> dict[str, Phase]:
        """The phases of variables that this phase borrows, by the variable's name."""
        return {
            name: owner
            for name in self.names
            for prefix, owner in shared.items()
            if not prefix or name == prefix or name.startswith(f"{prefix}.")
        }

    def _is_trainable(self, name: str) -> bool:
        """Whether a variable is trained."""
        settings, owner = self._settings, self._owner_of.get(name, self._weights_owner)
        return settings.training and settings.is_variable_trainable(owner.name, name)

    # ---- graphs ---------------------------------------------------------------------------------
    def _build_forward(self, forward: addons.GraphWithNamedArgs) -> None:
        """The forward graph alone: in evaluation, and where nothing up to here is trained."""
        tensors = zip(forward.graph.inputs, self._inputs.values(), strict=False)
        results, settings = forward.graph.outputs, self._settings
        serialised = batch_serialise(
            forward,
            settings.micro_batches_per_pass,
            load_handles={t: layer_io.value for t, layer_io in tensors},
            store_streams=self._streams(results),
            store_buffers={
                t: layer_io.handle for t, layer_io in zip(results, self._outputs, strict=False)
            },
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
        with_grad = [tensors[n] for n, layer_io in inputs.items() if layer_io.grad is not None]
        results = dict(zip(forward.graph.outputs, self._outputs, strict=True))
        with popxl.transforms.saving(popxl.transforms.products_saveable):
            self._grad_facts, grad = addons.autodiff_with_accumulation(
                forward,
                self._accumulated(forward),
                grads_provided=[t for t, layer_io in results.items() if layer_io.grad is not None],
                grads_required=with_grad,
                mean=False,
                accumulator_dtype=popxl.float32 if settings.adds_gradients else None,
                adds=settings.adds_gradients,
            )
        # So keeping activations and computing them again give the same bits.
        popxl.transforms.outline(forward.graph, _forward_residuals(forward, grad))
        popxl.transforms.outline(grad.graph)
        if not self._saves_activations:
            grad = addons.recompute_graph(grad)
        loads = {tensors[n]: layer_io.value for n, layer_io in inputs.items()}
        for given, result in _output_grads(grad).items():
            gradient = results[result].grad
            assert gradient is not None, "the output of a layer has a gradient"
            loads[given] = gradient
        stores = {t: layer_io.handle for t, layer_io in results.items()}
        input_grads = [layer_io.grad for layer_io in inputs.values() if layer_io.grad is not None]
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
        frozen = {*self.names} - {*self.trainable}
        wanted = [name for name in forward.args.keys_flat() if name not in frozen]
        return forward.args.filter_keys(wanted).tensors

    def _create_variables(self) -> None:
        """Give own variables buffers, and let the phases that keep the others know."""
        settings = self._settings
        parameters = self._facts.of_kind("parameter").to_dict()
        own = {n: f for n, f in parameters.items() if n not in self._owner_of}
        facts = NamedVariableFactories.from_dict(own)
        trainable = [name for name in self.trainable if name in own]
        self.variables = (
            PhaseVariables.create(facts, self.name, self.entries, settings, trainable)
            if own
            else None
        )
        self.optimizer = (
            PhaseOptimizer.create(self.variables, self.name, self.entries, settings)
            if self.variables and trainable
            else None
        )
        self.fp8 = FP8State.create(self._facts, self.entries, settings)
        if self.optimizer is not None:
            self._build_update()
        self.keep_resident(settings.config.execution.resident_layers)
        self._borrowers: dict[
            str, list[Phase]
        ] = {}  # own variables, and who adds to their gradients
        for name, owner in self._owner_of.items():
            if name in self.trainable:
                owner._borrowers.setdefault(name, []).append(self)
        self._build_reduction()

    def _borrow_variables(self, other: Phase) -> None:
        """Use the variables, FP8 state and gradients of a phase, and its optimizer."""
        assert self.names == other.names, "phases that are alike have the same variables"
        self.variables, self.fp8, self.optimizer = other.variables, other.fp8, other.optimizer
        self._borrowers = other._borrowers
        if self.optimizer is not None:
            self._optim, self._updated = other._optim, other._updated
        self._build_reduction()

    def _build_update(self) -> None:
        """The update of a layer, the same executables wherever in a step it runs."""

        def update(row: popxl.Tensor, norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
            assert self.variables is not None
            assert self.optimizer is not None
            new = self.optimizer.update(self.variables, row, UpdateInputs(norm, lr))
            if self.fp8:
                new |= self.fp8.update(row, norm)
            self._updated[:] = new
            return list(new.values())

        self._updated = []
        row, scalar = popxl.TensorSpec((), popxl.int32), popxl.TensorSpec((), popxl.float32)
        self._optim = popxl.gir().create_graph(update, row, scalar, scalar)

    def _build_reduction(self) -> None:
        if not self.trainable or self.bwd is None:
            return
        settings = self._settings
        groups = {n: self._store_of(n).shard_groups[n] for n in self.trainable}
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
        return addons.NamedTensors.from_dict({n: args.get(f"accum.{n}") for n in self.trainable})

    def _store_of(self, name: str) -> PhaseVariables:
        store = self._owner_of[name].variables if name in self._owner_of else self.variables
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
        if not self.variables or not self.owns_variables:
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
                self.variables.store_gathered(row, full)
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
        for owner in dict.fromkeys(self._owner_of.values()):
            assert owner.variables is not None
            names = [name for name, of in self._owner_of.items() if of is owner]
            borrowed |= self._reloaded(owner.variables.of_variables(names), first)
        return borrowed

    def _reloaded(self, store: PhaseVariables, row: popxl.Tensor) -> dict[str, popxl.Tensor]:
        """Full variables, which were gathered before if there are several passes."""
        full = store.load_gathered(row) if self._settings.passes > 1 else store.load_full(row)
        return store.dequantized(full).to_dict()

    def _seed(self, row: popxl.Tensor, step: StepInputs) -> list[popxl.Tensor]:
        """The pass's first micro-batch, where a step has several passes, and the seed of layer
        `row`, the same forwards and backwards."""
        if self._settings.seed_spec is None:
            return []
        assert step.seed is not None
        tag = popxl.constant(_phase_seed(self._seed_name), popxl.uint32)
        seed = create_random_seed(create_random_seed(step.seed, tag), ops.cast(row, popxl.uint32))
        first = step.first_micro_batch
        return [seed] if first is None else [first, seed]

    def _begins(self, name: str) -> bool:
        """Whether the gradient of a borrowed variable begins with this phase's.

        It does where this phase alone borrows it. The layers of a loop are alike, so all of them
        add to what is there.
        """
        return self.entries == 1 and self._owner_of[name]._borrowers[name] == [self]

    def zero_shared_grads(self) -> None:
        """Let the gradients that other phases add to start from zero, after the last update."""
        for name, borrowers in sorted(self._borrowers.items()):
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
            sums = None if step.is_first else self._weights_owner._sums
            accumulators = (
                self._grad_facts.init_zero() if sums is None else sums.load_accumulators(row)
            )
            values = {**self._load_for_gradients(row, step).to_dict(), **accumulators.to_dict()}
            bound = self.bwd.bind(addons.NamedTensors.from_dict(values))
            # Where activations are kept, so are the masks of dropout: there is no seed to pass.
            takes_seed = self.bwd is self.fwd or _SEED in self.bwd.args
            bound.call(row, *(self._seed(row, step) if takes_seed else []))
            if not step.is_last:
                self._weights_owner._sums.store(row, accumulators, is_first=step.is_first)
                return squares
            total = accumulators if sums is None else sums.total(row, accumulators)
            return squares + self._finish_gradients(row, total)

    @cached_property
    def _sums(self) -> GradientSums:
        """Buffers of accumulators between passes: for gradients that are stored whole, and that no
        other phase adds to, their own. Known once all phases are there."""
        at_hand, dtype = {}, self._settings.gradient_dtype
        for name in self.trainable:
            if name not in self._owner_of and name not in self._borrowers:
                buffer = self._store_of(name).grads.get(name)
                if not buffer.meta_shape:
                    at_hand[f"accum.{name}"] = buffer
        dtypes = {f"accum.{name}": dtype for name in self.trainable}
        return GradientSums.create(self._grad_facts, at_hand, dtypes, self.entries)

    def _finish_gradients(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors
    ) -> popxl.Tensor:
        if self.fp8:
            self.fp8.observe(row, accumulators)
        if not self.trainable:
            return popxl.constant(0.0, popxl.float32)
        outputs = self._reduce.bind(self._accumulators(accumulators)).call()
        reduced = dict(zip(self._reduced, outputs, strict=True))
        complete = {}
        for name, grad in reduced.items():
            foreign = name in self._owner_of
            buffer = self._store_of(name).grads.get(name)
            at = popxl.constant(0, popxl.int32) if foreign else row
            if name in self._borrowers or (foreign and not self._begins(name)):
                grad = grad + ops.cast(ops.remote_load(buffer, at), grad.dtype)
            ops.remote_store(buffer, at, addons.round_by_hash(grad, buffer.tensor_dtype))
            if not foreign:
                complete[name] = grad
        if not self.variables:
            return popxl.constant(0.0, popxl.float32)
        return weighted_squares(complete, self.variables, self._settings.config.gradient_scaling)

    def update(self, row: popxl.Tensor, update: UpdateInputs) -> dict[str, popxl.Tensor]:
        """Optimizer step of layer `row`.

        Returns:
            The new variables, as this replica stores them, and FP8 state, by name.
        """
        if self.optimizer is None:
            return {}
        with self.part("update"):
            new = ops.call(self._optim, row, *update.tensors)
        return dict(zip(self._updated, new, strict=True))


def _output_grads(grad: addons.GraphWithNamedArgs) -> dict[popxl.Tensor, popxl.Tensor]:
    """The inputs of a gradient graph for gradients of the layer's outputs, and these outputs."""
    expected = grad.grad_graph_info.expected_inputs
    given = popxl.transforms.ExpectedConnectionType.FwdGrad
    pairs = zip(grad.graph.inputs, expected, strict=False)
    return {t: c.fwd_tensor for t, c in pairs if c.connection_type == given}


def _forward_residuals(
    forward: addons.GraphWithNamedArgs, grad: addons.GraphWithNamedArgs
) -> list[popxl.Tensor]:
    """What a gradient graph takes from its forward graph, besides inputs."""
    inputs = set(forward.graph.inputs)
    expected = grad.grad_graph_info.expected_inputs
    taken = popxl.transforms.ExpectedConnectionType.Fwd
    tensors = [c.fwd_tensor for c in expected if c.connection_type == taken]
    return [t for t in tensors if t not in inputs]


def _phase_seed(name: str) -> int:
    """A number for the name of a phase, the same in every process."""
    return zlib.crc32(name.encode())
