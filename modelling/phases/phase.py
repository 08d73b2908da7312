"""A phase: layers of one type with their forward, backward and optimizer graphs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import popxl
import popxl_addons as addons
from modelling.layers.layer_wrapper import PositionalInputs, layer_class_name
from modelling.phases.buffers import LayerIO, store_gradient
from modelling.phases.phase_optimizer import PhaseOptimizer, weighted_sum_of_squares
from modelling.phases.phase_variables import PhaseVariables
from modelling.phases.settings import PhaseSettings
from modelling.phases.step_inputs import StepInputs, UpdateInputs
from popxl import ops
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.rts import reduce_replica_sharded_graph
from popxl_addons.transforms.batch_serialisation import (
    batch_serialise,
    batch_serialise_fwd_and_grad,
)
from popxl_addons.variable_factory import NamedVariableFactories

if TYPE_CHECKING:
    from modelling.phases.fp8_state import FP8State
    from modelling.phases.gradient_sums import GradientSums

_SEED = "seed"  # name of the seed among the arguments of a gradient graph


class SavedLayers(NamedTuple):
    """The last layers of a phase, which save activations for the backward pass.

    Attributes:
        first_layer: index of the first such layer.
        phase_name: name of the phase, from which seeds are derived.
    """

    first_layer: int
    phase_name: str


class Phase:
    """Layers of one type: the graphs that all of them share, and the variables of each layer.

    A pass loads the variables of a layer once and runs the forward graph on all its micro-batches
    in a loop; likewise the gradient graph, which accumulates gradients. The gradient graph
    recomputes the layer's activations or loads saved ones (`execution.activations`).

    Attributes:
        layer_type: name of the module's class.
        names: names of the variables that the phase loads, owned and borrowed.
        trainable: names of the variables that are trained; only they have gradients, accumulators
            and optimizer state, and are written back (`WeightMapping.trainable`).
        fwd: the forward graph.
        bwd: the gradient graph; None if nothing in or before the phase is trainable.
        saved_layers: number of layers, the last ones, whose activations are saved.

    Args:
        module: the layer; `build(<inputs>, seed=None)` returns a tensor for each output.
        inputs: the inputs by the names of `build`'s parameters.
        outputs: the outputs; empty if the output is the loss.
        num_layers: number of layers.
        shared: variables that other phases own, as name in the module's tree -> phase. The name of
            a subtree stands for all its variables, "" for all variables.
        share_weights_with: another phase over the same layers which owns the variables; the
            caller picks one of the two for each layer.
        last_layers: the layers that save their activations, where `share_weights_with` runs the
            others.
    """

    _owner_of: dict[str, Phase]  # the owners of borrowed variables
    _update_graph: popxl.Graph  # the update graph of a layer
    _updated_names: list[str]  # names of the outputs of `_update_graph`

    def __init__(
        self,
        name: str,
        module: addons.Module,
        inputs: Mapping[str, LayerIO],
        outputs: Sequence[LayerIO],
        settings: PhaseSettings,
        num_layers: int = 1,
        shared: Mapping[str, Phase] | None = None,
        share_weights_with: Phase | None = None,
        last_layers: SavedLayers | None = None,
    ) -> None:
        self.name, self.num_layers, self._settings = name, num_layers, settings
        self._module, self._inputs, self._outputs = module, inputs, outputs
        self.num_saved_layers = settings.num_saved_layers(name, num_layers)
        self._saves_activations = last_layers is not None or self.num_saved_layers == num_layers
        self._first_layer, self._seed_name = (
            (0, name) if last_layers is None else (last_layers.first_layer, last_layers.phase_name)
        )
        self.layer_type = layer_class_name(module)
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
        input_has_grad = any(layer_io.grad for layer_io in inputs.values())
        self.bwd: addons.GraphWithNamedArgs | None = None
        if self.trainable or (settings.is_training and input_has_grad):
            self._build_graphs(forward)
        else:
            self._build_forward_graph(forward)
        if share_weights_with is None:
            self._create_variables()
        else:
            self._borrow_variables(share_weights_with)

    def build_saved_layers_phase(self) -> Phase:
        """Returns a phase over the last `num_saved_layers` layers that saves their activations.

        It has the same variables.
        """
        last_layers = SavedLayers(self.num_layers - self.num_saved_layers, self.name)
        layer = self._module, self._inputs, self._outputs, self._settings, self.num_layers
        owner = self._weights_owner
        return Phase(
            f"{self.name}_saved", *layer, share_weights_with=owner, last_layers=last_layers
        )

    def _find_owners(self, shared: Mapping[str, Phase]) -> dict[str, Phase]:
        """Returns, by name of each variable shared with other phases, the phase that owns it."""
        return {
            name: owner
            for name in self.names
            for prefix, owner in shared.items()
            if not prefix or name == prefix or name.startswith(f"{prefix}.")
        }

    def _is_trainable(self, name: str) -> bool:
        """True if training changes the named variable."""
        settings, owner = self._settings, self._owner_of.get(name, self._weights_owner)
        return settings.is_training and settings.is_variable_trainable(owner.name, name)

    # ---- graphs ---------------------------------------------------------------------------------
    def _build_forward_graph(self, forward: addons.GraphWithNamedArgs) -> None:
        """Build only the forward graph, for evaluation and phases without a backward pass."""
        tensors = zip(forward.graph.inputs, self._inputs.values(), strict=False)
        results, settings = forward.graph.outputs, self._settings
        serialised = batch_serialise(
            forward,
            settings.micro_batches_per_pass,
            load_handles={t: layer_io.value for t, layer_io in tensors},
            store_streams=self._output_streams(results),
            store_buffers={
                t: layer_io.value_handle
                for t, layer_io in zip(results, self._outputs, strict=False)
            },
            seed_input=self._seed_input(forward),
            rows=max(self.num_layers, 2),
            io_mode="compute",
            numbered=settings.num_passes > 1,
        )
        self.fwd = serialised.graph

    def _seed_input(self, forward: addons.GraphWithNamedArgs) -> popxl.Tensor | None:
        """Returns the forward graph's seed input; None if the layer draws no random numbers."""
        if self._settings.seed_spec is None:
            return None
        return forward.graph.inputs[len(self._inputs)]

    def _output_streams(
        self, results: Sequence[popxl.Tensor]
    ) -> dict[popxl.Tensor, popxl.DeviceToHostStream]:
        """Returns device-to-host streams by the forward graph's output that each one sends."""
        return {}

    def _build_graphs(self, forward: addons.GraphWithNamedArgs) -> None:
        """Build the forward and the gradient graph of one layer."""
        settings, inputs = self._settings, self._inputs
        tensors = dict(zip(inputs, forward.graph.inputs, strict=False))
        seed = self._seed_input(forward)
        with_grad = [tensors[n] for n, layer_io in inputs.items() if layer_io.grad is not None]
        results = dict(zip(forward.graph.outputs, self._outputs, strict=True))
        policy = popxl.transforms.products_saveable
        if settings.saves_matmul_inputs and self._saves_activations:
            policy = popxl.transforms.matmul_inputs_saveable
            if settings.micro_batches_per_pass == 1:
                policy = popxl.transforms.matmul_operands_saveable
        with popxl.transforms.save_policy(policy):
            self._grad_facts, grad = addons.autodiff_with_accumulation(
                forward,
                self._accumulated_inputs(forward),
                grads_provided=[t for t, layer_io in results.items() if layer_io.grad is not None],
                grads_required=with_grad,
                mean=False,
                accumulator_dtype=popxl.float32 if settings.accumulates_gradients else None,
                adds=settings.accumulates_gradients,
            )
        # Saved and recomputed activations must have the same bits.
        popxl.transforms.outline(forward.graph, _forward_residuals(forward, grad))
        popxl.transforms.outline(grad.graph)
        if not self._saves_activations:
            grad = addons.recompute_graph(grad)
        loads = {tensors[n]: layer_io.value for n, layer_io in inputs.items()}
        for grad_input, output in _outputs_by_grad_input(grad).items():
            output_grad = results[output].grad
            assert output_grad is not None, "the output of a layer has a gradient"
            loads[grad_input] = output_grad
        stores = {t: layer_io.value_handle for t, layer_io in results.items()}
        input_grads = [layer_io.grad for layer_io in inputs.values() if layer_io.grad is not None]
        stores.update(zip(grad.graph.outputs, input_grads, strict=True))
        named = forward.args.copy()
        if seed is not None:  # an argument is passed again, not stored with the activations
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
            rows=self.num_layers,
            io_mode="compute",
            first_row=self._first_layer,
            numbered=settings.num_passes > 1,
        )
        for handle in fwd.stored_buffers.values():
            handle.buffer.kind = handle.buffer.kind or "activations inside layers"
        self.fwd, self.bwd = fwd.graph, bwd.graph

    def _accumulated_inputs(self, forward: addons.GraphWithNamedArgs) -> tuple[popxl.Tensor, ...]:
        """Inputs of the forward graph whose gradients accumulate: trainable variables, FP8 scales.

        The "gradients" of the scales are the observed amaxes.
        """
        frozen = {*self.names} - {*self.trainable}
        names = [name for name in forward.args.keys_flat() if name not in frozen]
        return forward.args.filter_keys(names).tensors

    def _create_variables(self) -> None:
        """Create remote buffers of own variables; add this phase to the users of shared ones."""
        settings = self._settings
        parameters = self._facts.of_kind("parameter").to_dict()
        owned = {n: f for n, f in parameters.items() if n not in self._owner_of}
        facts = NamedVariableFactories.from_dict(owned)
        trainable = [name for name in self.trainable if name in owned]
        self.variables = (
            PhaseVariables.create_buffers(facts, self.name, self.num_layers, settings, trainable)
            if owned
            else None
        )
        self.optimizer = (
            PhaseOptimizer.create_state(self.variables, self.name, self.num_layers, settings)
            if self.variables and trainable
            else None
        )
        self.fp8: FP8State | None = None
        if settings.config.fp8.enabled:
            from modelling.phases.fp8_state import FP8State

            self.fp8 = FP8State.create_buffers(self._facts, self.num_layers, settings)
        if self.optimizer is not None:
            self._build_update_graph()
        self.keep_resident(settings.config.execution.resident_layers)
        # Phases that add to the gradient of an owned variable, by its name.
        self._borrowers: dict[str, list[Phase]] = {}
        for name, owner in self._owner_of.items():
            if name in self.trainable:
                owner._borrowers.setdefault(name, []).append(self)
        self._build_gradient_reduction()

    def _borrow_variables(self, owner: Phase) -> None:
        """Use another phase's variables, gradients, FP8 state and optimizer instead of own ones."""
        assert self.names == owner.names, "phases that share weights have the same variables"
        self.variables, self.fp8, self.optimizer = owner.variables, owner.fp8, owner.optimizer
        self._borrowers = owner._borrowers
        if self.optimizer is not None:
            self._update_graph, self._updated_names = owner._update_graph, owner._updated_names
        self._build_gradient_reduction()

    def _build_update_graph(self) -> None:
        """Build one layer's update graph, compiled once although several loops run it."""

        def update(row: popxl.Tensor, norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
            assert self.variables is not None
            assert self.optimizer is not None
            new = self.optimizer.update(self.variables, row, UpdateInputs(norm, lr))
            if self.fp8:
                new |= self.fp8.update_scales(row, norm)
            self._updated_names[:] = new
            return list(new.values())

        self._updated_names = []
        row, scalar = popxl.TensorSpec((), popxl.int32), popxl.TensorSpec((), popxl.float32)
        self._update_graph = popxl.gir().create_graph(update, row, scalar, scalar)

    def _build_gradient_reduction(self) -> None:
        """Build the graph that averages gradients over data-parallel replicas, then shards them."""
        if not self.trainable or self.bwd is None:
            return
        settings = self._settings
        groups = {n: self._variables_containing(n).shard_groups[n] for n in self.trainable}
        sums = self._accumulators_by_name(self.bwd.args).map(
            lambda t: popxl.TensorSpec(t.shape, popxl.float32, t.meta_shape)
        )
        self._reduce, self._reduced_names = reduce_replica_sharded_graph(
            sums,
            "mean",
            shard_groups=NamedReplicaGrouping.from_dict(groups),
            replica_group=settings.groups.dp,
        )

    def keep_resident(self, num_layers: int) -> None:
        """Keep variables, gradients and optimizer state of the first layers on the device."""
        if self.variables and self._settings.is_training:
            state = [self.optimizer.buffers] if self.optimizer else []
            for tree in (self.variables.buffers, self.variables.grads, *state):
                for buffer in tree.to_dict().values():
                    buffer.resident = min(num_layers, self.num_layers)

    def _accumulators_by_name(self, args: addons.NamedTensors) -> addons.NamedTensors:
        return addons.NamedTensors.from_dict({n: args.get(f"accum.{n}") for n in self.trainable})

    def _variables_containing(self, name: str) -> PhaseVariables:
        """Remote buffers of the phase (this or another one) that owns the variable `name`."""
        phase = self._owner_of.get(name, self)
        assert phase.variables is not None
        return phase.variables

    def init_variables(self, with_gradients: bool = False) -> list[addons.NamedTensors]:
        """Create host-accessible variables and optimizer state of each layer, filled with zeros.

        Args:
            with_gradients: True to create variables through which the host reads the gradients.

        Returns:
            A tree for each layer: `fwd` (variables and FP8 state), in training `optim` (optimizer
            state by variable) and, if requested, `grad` (gradients times
            `RunConfig.gradient_scaling`).
        """
        if not self.variables or not self.owns_variables:
            return []
        return [self._init_layer_variables(row, with_gradients) for row in range(self.num_layers)]

    def _init_layer_variables(self, row: int, with_gradients: bool) -> addons.NamedTensors:
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
        if with_gradients:
            layer.insert("grad", self.variables.create_gradient_variables(row, f"{prefix}.grad"))
        return layer

    # ---- running --------------------------------------------------------------------------------
    def label_in_plan(self, direction: str) -> AbstractContextManager[Any]:
        """Context manager that labels ops as `<phase>/<direction>` in plans."""
        return popxl.plan.part(f"{self.name}/{direction}")

    def _load_code(self, graph: popxl.Graph) -> None:
        """Load a graph's executable code onto the device where `execution.code_load` says so."""
        if self._settings.config.execution.code_load:
            ops.remote_code_load(graph, "executable")

    def _load_full(self, row: popxl.Tensor, step: StepInputs) -> addons.NamedTensors:
        """Load full variables and FP8 scales of layer `row`, at the first use in a pass.

        A pending update runs first, and its results are not loaded again. The first of several
        passes stores the gathered variables for the others.
        """
        if not step.is_first:
            return self._reload_full(row)
        new = {} if step.update is None else self.update(row, step.update)
        owned: dict[str, popxl.Tensor] = {}
        if self.variables:
            full = self.variables.load_full(row, new)
            if not step.is_last:
                self.variables.store_gathered(row, full)
            owned = self.variables.dequantize(full).to_dict()
        scales = self.fp8.adapt_scales(new or self.fp8.load_scales(row)) if self.fp8 else {}
        return addons.NamedTensors.from_dict({**owned, **self._load_shared_variables(), **scales})

    def _reload_full(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Load again, in the same pass, the tensors that `_load_full` loaded for layer `row`."""
        owned = self._reload_variables(self.variables, row) if self.variables else {}
        scales = self.fp8.adapt_scales(self.fp8.load_scales(row)) if self.fp8 else {}
        return addons.NamedTensors.from_dict({**owned, **self._load_shared_variables(), **scales})

    def _load_for_backward(self, row: popxl.Tensor, step: StepInputs) -> addons.NamedTensors:
        """Load full variables and FP8 scales of layer `row` for the backward pass."""
        return self._reload_full(row)

    def _load_shared_variables(self) -> dict[str, popxl.Tensor]:
        """Load full variables that other phases own, which ran before this one."""
        first, shared = popxl.constant(0, popxl.int32), dict[str, popxl.Tensor]()
        for owner in dict.fromkeys(self._owner_of.values()):
            assert owner.variables is not None
            names = [name for name, phase in self._owner_of.items() if phase is owner]
            shared |= self._reload_variables(owner.variables.select_variables(names), first)
        return shared

    def _reload_variables(
        self, variables: PhaseVariables, row: popxl.Tensor
    ) -> dict[str, popxl.Tensor]:
        """Load full variables; with several passes per step, the full copies of the first."""
        several = self._settings.num_passes > 1
        full = variables.load_gathered(row) if several else variables.load_full(row)
        return variables.dequantize(full).to_dict()

    def _seed_args(self, row: popxl.Tensor, step: StepInputs) -> list[popxl.Tensor]:
        """Arguments for layer `row`'s random seed, the same in the forward and the backward pass.

        They are the layer's seed, uint32 (2,), after the index of the pass's first micro-batch if
        the step has several passes.
        """
        if self._settings.seed_spec is None:
            return []
        assert step.seed is not None
        from popxl.ops.random import create_random_seed

        # A hash that is equal in every process.
        name_hash = popxl.constant(zlib.crc32(self._seed_name.encode()), popxl.uint32)
        seed = create_random_seed(
            create_random_seed(step.seed, name_hash), ops.cast(row, popxl.uint32)
        )
        first = step.first_micro_batch
        return [seed] if first is None else [first, seed]

    def _overwrites_grad(self, name: str) -> bool:
        """True if this phase overwrites the gradient of a shared variable instead of adding to it.

        It does so if it is the only borrower. Layers in a loop run the same ops, so all of them
        add.
        """
        return self.num_layers == 1 and self._owner_of[name]._borrowers[name] == [self]

    def _shares_accumulator(self, name: str) -> bool:
        """True if the owner of a shared variable reads the other user's accumulator.

        If there is one other user, each of the two accumulates in an entry that it writes last,
        whose memory it may reuse.
        """
        owner = self._owner_of.get(name, self)
        is_sharded = bool(self._variables_containing(name).grads.get(name).meta_shape)
        several = self._settings.num_passes > 1
        return several and not is_sharded and owner._borrowers[name][0]._overwrites_grad(name)

    def _shared_gradient_buffer(self, name: str) -> popxl.RemoteBuffer:
        """Remote buffer of the gradient that a shared variable's other users leave its owner."""
        owner = self._owner_of.get(name, self)
        if name in owner._borrowers and self._shares_accumulator(name):
            return owner._borrowers[name][0]._gradient_sums.buffers.get(f"accum.{name}")
        return self._variables_containing(name).grads.get(name)

    def zero_shared_grads(self) -> None:
        """Zero the gradients of shared variables, to which several phases add."""
        for name, borrowers in sorted(self._borrowers.items()):
            if borrowers[0]._overwrites_grad(name):
                continue
            buffer = self._variables_containing(name).grads.get(name)
            zero = ops.init(buffer.tensor_shape, buffer.tensor_dtype, meta_shape=buffer.meta_shape)
            ops.remote_store(buffer, 0, zero)

    def forward(self, row: popxl.Tensor, step: StepInputs) -> None:
        """Run layer `row` forward on a pass's micro-batches, after its deferred update, if any."""
        with self.label_in_plan("forward"):
            self._load_code(self.fwd.graph)
            self.fwd.bind(self._load_full(row, step)).call(row, *self._seed_args(row, step))

    def backward(
        self, row: popxl.Tensor, step: StepInputs, sum_squares: popxl.Tensor
    ) -> popxl.Tensor:
        """Run the gradient graph of layer `row` on all micro-batches of a pass.

        The last pass of a step also reduces and stores the gradients.

        Returns:
            `sum_squares` plus this replica's share of the sum of squares of the gradients that are
            now complete, float32 scalar.
        """
        if self.bwd is None:
            return sum_squares
        with self.label_in_plan("backward"):
            self._load_code(self.bwd.graph)
            sums = None if step.is_first else self._weights_owner._gradient_sums
            accumulators = (
                self._grad_facts.init_zero() if sums is None else sums.load_accumulators(row)
            )
            values = {**self._load_for_backward(row, step).to_dict(), **accumulators.to_dict()}
            bound = self.bwd.bind(addons.NamedTensors.from_dict(values))
            # Saved activations include dropout masks; no seed is needed.
            takes_seed = self.bwd is self.fwd or _SEED in self.bwd.args
            bound.call(row, *(self._seed_args(row, step) if takes_seed else []))
            if not step.is_last:
                self._weights_owner._gradient_sums.store_accumulators(
                    row, accumulators, is_first=step.is_first
                )
                return sum_squares
            total = accumulators if sums is None else sums.sum_over_passes(row, accumulators)
            return sum_squares + self._reduce_and_store_gradients(row, total)

    @cached_property
    def _gradient_sums(self) -> GradientSums:
        """Remote buffers of this phase's gradient accumulators, created when all phases exist.

        A gradient that is not sharded uses its own buffer, unless other phases add to it there.
        """
        from modelling.phases.gradient_sums import GradientSums

        reusable, dtype = {}, self._settings.gradient_dtype
        for name in self.trainable:
            is_own = name not in self._owner_of
            if is_own and (name not in self._borrowers or self._shares_accumulator(name)):
                buffer = self._variables_containing(name).grads.get(name)
                if not buffer.meta_shape:
                    reusable[f"accum.{name}"] = buffer
        dtypes = {f"accum.{name}": dtype for name in self.trainable}
        return GradientSums.create_buffers(self._grad_facts, reusable, dtypes, self.num_layers)

    def _reduce_and_store_gradients(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors
    ) -> popxl.Tensor:
        """Reduce and store gradients of layer `row`; returns this replica's sum of squares."""
        if self.fp8:
            self.fp8.store_amaxes(row, accumulators)
        if not self.trainable:
            return popxl.constant(0.0, popxl.float32)
        outputs = self._reduce.bind(self._accumulators_by_name(accumulators)).call()
        reduced = dict(zip(self._reduced_names, outputs, strict=True))
        complete = {}
        for name, grad in reduced.items():
            shared = name in self._owner_of
            buffer = self._variables_containing(name).grads.get(name)
            entry = popxl.constant(0, popxl.int32) if shared else row
            shared_sum = self._shared_gradient_buffer(name)
            if name in self._borrowers or (shared and not self._overwrites_grad(name)):
                grad = grad + ops.cast(ops.remote_load(shared_sum, entry), grad.dtype)
            target = shared_sum if shared else buffer
            store_gradient(target, entry, grad)
            if not shared:
                complete[name] = grad
        if not self.variables:
            return popxl.constant(0.0, popxl.float32)
        return weighted_sum_of_squares(
            complete, self.variables, self._settings.config.gradient_scaling
        )

    def update(self, row: popxl.Tensor, update_inputs: UpdateInputs) -> dict[str, popxl.Tensor]:
        """Run the optimizer update of layer `row`, from its stored gradients.

        Returns:
            This replica's new shards of variables, and the new FP8 state, by name.
        """
        if self.optimizer is None:
            return {}
        with self.label_in_plan("update"):
            new = ops.call(self._update_graph, row, *update_inputs.tensors)
        return dict(zip(self._updated_names, new, strict=True))


def _outputs_by_grad_input(grad: addons.GraphWithNamedArgs) -> dict[popxl.Tensor, popxl.Tensor]:
    """Map each gradient that a gradient graph takes to the forward graph's output it belongs to."""
    expected = grad.grad_graph_info.expected_inputs
    fwd_grad = popxl.transforms.ExpectedConnectionType.FwdGrad
    pairs = zip(grad.graph.inputs, expected, strict=False)
    return {t: c.fwd_tensor for t, c in pairs if c.connection_type == fwd_grad}


def _forward_residuals(
    forward: addons.GraphWithNamedArgs, grad: addons.GraphWithNamedArgs
) -> list[popxl.Tensor]:
    """Residuals: intermediate tensors of the forward graph that the gradient graph reads."""
    inputs = set(forward.graph.inputs)
    expected = grad.grad_graph_info.expected_inputs
    fwd = popxl.transforms.ExpectedConnectionType.Fwd
    tensors = [c.fwd_tensor for c in expected if c.connection_type == fwd]
    return [t for t in tensors if t not in inputs]
