"""Optimizer state and updates of a phase's sharded variables, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import popxl
import popxl_addons as addons
from modelling.phases.phase_variables import PhaseVariables, label_buffers
from modelling.phases.settings import PhaseSettings
from modelling.phases.step_inputs import UpdateInputs
from popxl import ops
from popxl_addons.remote import NamedRemoteBuffers, named_variable_buffers
from popxl_addons.variable_factory import NamedVariableFactories

if TYPE_CHECKING:
    from popxl_addons.optimizers.adafactor import MatrixLayout

_VARIABLE = ""  # key of the variable itself, next to the names of its state
_SCALAR = popxl.TensorSpec((), popxl.float32)


@dataclass(frozen=True)
class PhaseOptimizer:
    """Optimizer state of a phase in remote buffers, and the graphs that update its variables.

    Attributes:
        facts: factories of the state, by variable.
        buffers: remote buffers of the state, by variable.
        clips: True if the updates clip gradients to a global norm.
        steps: update graph of each variable.
    """

    facts: NamedVariableFactories
    buffers: NamedRemoteBuffers
    clips_gradients: bool
    update_graphs: dict[str, addons.GraphWithNamedArgs]

    @classmethod
    def create_state(
        cls, variables: PhaseVariables, phase: str, num_layers: int, settings: PhaseSettings
    ) -> PhaseOptimizer:
        """Create state and update graphs for the trainable variables of a phase.

        Vectors (norms, biases) have no weight decay.
        """
        state_facts, steps = {}, {}
        loaded = dict(zip(variables.names, variables.load_graph.graph.outputs, strict=True))
        for name in variables.grads.keys_flat():
            shard = loaded[name]
            factory = variables.facts.get(name)
            matrix_layout = partial(settings.matrix_layout, phase, name)
            args = matrix_layout, shard.spec, factory, settings
            state_facts[name], steps[name] = _build_update_graph(*args)
        facts = NamedVariableFactories.from_dict(state_facts)
        buffers = named_variable_buffers(facts, num_layers, False)
        label_buffers(buffers, "moments")
        clips = settings.config.training.optimizer.gradient_clipping is not None
        return cls(facts, buffers, clips, steps)

    def update(
        self, variables: PhaseVariables, row: popxl.Tensor, update_inputs: UpdateInputs
    ) -> dict[str, popxl.Tensor]:
        """Run one optimizer step on layer `row`, unless the global gradient norm is not finite.

        A skipped step changes no bit of variables and state, including the step counter of Adam's
        bias correction. Variables are updated one after the other, so the device holds the state
        of a few at a time.

        Returns:
            The new shards of this replica, by variable.
        """
        is_finite = ops.isfinite(update_inputs.norm)
        updated = {}
        for name, step in self.update_graphs.items():
            buffers = _variable_and_state_buffers(name, variables, self)
            tensors = {key: ops.remote_load(b, row) for key, b in buffers.items()}
            grad = ops.remote_load(variables.grads.to_dict()[name], row)
            shard = tensors[_VARIABLE]
            state = {key: t for key, t in tensors.items() if key != _VARIABLE}
            step.bind(addons.NamedTensors.from_dict(state)).call(
                shard, grad, update_inputs.lr, *self._norm_args(update_inputs.norm), is_finite
            )
            for key, t in tensors.items():
                ops.remote_store(buffers[key], row, t)
            updated[name] = shard
        return updated

    def _norm_args(self, norm: popxl.Tensor) -> list[popxl.Tensor]:
        """Arguments for the global gradient norm; empty if the updates do not clip."""
        return [norm] if self.clips_gradients else []


def _variable_and_state_buffers(
    name: str, variables: PhaseVariables, optimizer: PhaseOptimizer
) -> dict[str, popxl.RemoteBuffer]:
    """Remote buffers of a variable and of its optimizer state, by name."""
    state = optimizer.buffers.get(name).to_dict()
    return {_VARIABLE: variables.buffers.to_dict()[name], **state}


def _build_update_graph(
    matrix_layout: Callable[[], MatrixLayout],
    spec: popxl.TensorSpec,
    factory: addons.VariableFactory,
    settings: PhaseSettings,
) -> tuple[NamedVariableFactories, addons.GraphWithNamedArgs]:
    """Build the optimizer update graph of a variable with a shard of `spec` on each replica."""
    optimizer = settings.config.training.optimizer
    rank = len(factory.shape_on_replica)
    master = None if spec.dtype == popxl.float32 else settings.config.master_weight_slot
    step, kwargs = optimizer.registry_entry.build_step(optimizer, rank, matrix_layout)
    if master is not None:
        from modelling.phases.master_weights import with_master_weight

        step = with_master_weight(step, master)
    module = step()
    clipping = {}
    if optimizer.gradient_clipping is not None:
        clipping = {"global_norm": _SCALAR, "global_norm_max": optimizer.gradient_clipping}
    grad = popxl.TensorSpec(spec.shape, settings.gradient_dtype, spec.meta_shape)
    return module.create_graph(
        spec,
        grad,
        replica_grouping=factory.replica_grouping,
        lr=_SCALAR,
        weight_decay=optimizer.weight_decay if rank > 1 else 0.0,
        loss_scaling=settings.config.gradient_scaling,
        **kwargs,
        **clipping,
        apply_update=popxl.TensorSpec((), popxl.bool),
    )


def weighted_sum_of_squares(
    grads: dict[str, popxl.Tensor], variables: PhaseVariables, scaling: float
) -> popxl.Tensor:
    """This replica's term of the sum of squares of all gradients, unscaled: float32 scalar."""
    total: popxl.Tensor = popxl.constant(0.0, popxl.float32)
    for name, grad in grads.items():
        sum_squares = ops.sumsquare(grad / scaling)
        total = total + sum_squares * variables.sum_squares_weight(name)
    return total
