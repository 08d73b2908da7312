"""The fine-tuning session of a configured model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

import popdist
import popxl
import popxl_addons as addons
from config.metrics import MetricSums, add_metric_sums
from config.sections import RunConfig
from data.loader import BatchSharding
from data.samples import Batch
from modelling.devices import resolve_device_desc
from modelling.layers import EXPERT_USAGE, LOSS_STATS
from modelling.model_family import get_family
from modelling.objectives import LOSS_WEIGHT, make_objective
from modelling.phases.training import TrainingProgram, build_training_program
from modelling.weights import ShardReader, Variables
from planning.program_variants import Build, ProgramVariant, default_variant, plans_placement
from sessions.length_programs import LengthProgram, LengthPrograms
from sessions.session import ModelSession

if TYPE_CHECKING:
    from modelling.phases.teacher_head import TeacherHead


@dataclass(frozen=True)
class StepResult:
    """Loss, gradient norm, token counts and other metrics of one optimizer step.

    Attributes:
        loss: mean over the target tokens of the global batch, before the update.
        grad_norm: global norm of the gradients, before clipping; NaN if a loss is not finite.
        tokens: tokens of the global batch, without padding.
        target_tokens: the divisor of the mean loss: the number of target tokens.
        aux_metrics: the objective's other metrics and those of experts, by name.
    """

    loss: float
    grad_norm: float
    tokens: int = 0
    target_tokens: int = 0
    aux_metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """True if the devices skipped the update because loss or gradients are not finite."""
        return not math.isfinite(self.grad_norm)


class TrainingSession(ModelSession):
    """Trains a model. Use it as a context manager; write the weights before the first step."""

    def __init__(
        self, config: RunConfig, gradients: bool = False, teacher_head: TeacherHead | None = None
    ) -> None:
        """Build and compile the training program.

        Args:
            gradients: keep the gradients of the last step for `gradients`.
            teacher_head: whose head the program holds, if the objective compares with it.
        """
        self._family = family = get_family(config)
        self._pending: int | None = None  # number of the step whose update is deferred
        self._sharding, self._objective = BatchSharding.from_config(config), make_objective(config)
        weight_map = family.weight_map(config)

        def build_variant(config: RunConfig, variant: ProgramVariant) -> TrainingProgram:
            changed, saved = variant.apply_to(config), dict(variant.saved_layers)
            return build_training_program(
                changed,
                family.build_phases,
                gradients,
                weight_map,
                saved,
                variant.per_pass,
                teacher_head,
                variant.saves_matmul_inputs,
            )

        variants = dict[popxl.Ir, ProgramVariant]()

        def build(variant: ProgramVariant) -> TrainingProgram:
            program = build_variant(config, variant)
            variants[program.ir] = variant
            return program

        self.program = build_placed_program(config, build)
        variables = self.program.variables
        super().__init__(config, self.program.ir, weight_map, variables, teacher_head=teacher_head)
        chosen = variants[self.program.ir]
        self._programs = LengthPrograms(
            config, self.session, self.program, lambda shorter: build_variant(shorter, chosen)
        )

    # ---- state ----------------------------------------------------------------------------------
    def tensors(self, optimizer: bool = True, frozen: bool = True) -> Mapping[str, np.ndarray]:
        """Return weights and optimizer state as a lazy mapping: logical name -> full tensor.

        Each tensor is copied from the devices when it is read, fastest in order; the next step
        changes them. A deferred update is done first, on all processes together.

        Args:
            optimizer: include the optimizer state.
            frozen: include weights that are not trained.

        Raises:
            ValueError: the session is not entered.
        """
        self._check_entered()
        self.finish_update()
        session = self.session
        shards = ShardReader(session.variable_shards, session.read_variable_shard)
        read = session.read_variable_data
        return self._weight_map.to_logical_tensors(
            read, self.program.variables, optimizer, shards, frozen
        )

    def read(self, optimizer: bool = True) -> dict[str, np.ndarray]:
        """Return a copy of the weights and optimizer state that `tensors` maps lazily."""
        return dict(self.tensors(optimizer))

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the last step's gradients by weight name, loss scaling removed.

        Raises:
            ValueError: the session is not entered.
        """
        self._check_entered()
        read = self.session.read_variable_data
        by_name = self._weight_map.read_gradients(read, self.program.variables)
        return {name: g / self.config.gradient_scaling for name, g in by_name.items()}

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.finish_update()
        super().write(tensors)

    def value_readers(
        self, program_variables: Variables
    ) -> dict[popxl.Variable, Callable[[], np.ndarray]]:
        self.finish_update()
        return super().value_readers(program_variables)

    def finish_update(self) -> None:
        """Run the optimizer update that the last step deferred to the next one, if any.

        All processes do this together.
        """
        update_only = self.program.update_only
        if self._pending is None or update_only is None:
            return
        transfers, local = self.program.ir.num_host_transfers, self._sharding.local_replicas
        lead = (transfers, local.stop - local.start)
        inputs = {
            stream: np.zeros((*lead, *stream.shape), stream.dtype.as_numpy())
            for stream in self.session.expected_inputs()
        }
        inputs[update_only] = np.ones(lead, np.bool_)
        self._seed_rounding(self._pending)
        self.session.run(inputs)
        self._pending = None

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if not self.session.is_attached:
            self._pending = None  # the state is gone

    def _check_entered(self) -> None:
        if not self.session.is_attached:
            raise ValueError("read a model's tensors while it is entered: `with model:`")

    # ---- training -------------------------------------------------------------------------------
    def run(
        self, batches: Sequence[Batch], learning_rates: Sequence[float], first_step: int = 0
    ) -> list[StepResult]:
        """Run `execution.device_iterations` optimizer steps, one per global batch.

        Args:
            batches: the samples for this process's replicas (`data.loader.Loader`); with a single
                process, the full global batches.
            first_step: number of the first step, which seeds dropout and stochastic rounding.
        """
        iterations = self.config.execution.device_iterations
        if len(batches) != iterations or len(learning_rates) != iterations:
            raise ValueError(f"run takes {iterations} batches, but got {len(batches)}")
        counts, length_program = self._count_tokens(batches), self._programs.for_batches(batches)
        arrays = [
            self._arrange_batch(batch, n, length_program)
            for batch, (_, n) in zip(batches, counts, strict=True)
        ]
        program = length_program.program
        inputs = {
            stream: np.concatenate([by_name[name] for by_name in arrays])
            for name, stream in program.inputs.items()
        }
        inputs[program.learning_rate] = self._arrange_per_step(
            np.asarray(learning_rates, np.float32)
        )
        if program.seed is not None:
            inputs[program.seed] = self._step_seeds(first_step)
        if program.update_only is None:
            self._seed_rounding(first_step)
        else:
            inputs[program.update_only] = self._arrange_per_step(np.zeros(iterations, np.bool_))
            self._seed_rounding(first_step if self._pending is None else self._pending)
        outputs = self._run(inputs, length_program.run)
        results = self._step_results(program, outputs, counts, batches)
        if program.update_only is not None:
            self._pending = first_step + iterations - 1
        return results

    def _seed_rounding(self, step: int) -> None:
        """Seed stochastic rounding, if any, for the update of optimizer step `step`, for a run."""
        if not self.config.rounds_stochastically:
            return
        from popxl.random_seed import counter_seeds, two_uint32_to_uint64

        (seed,) = counter_seeds(self.config.model.seed, step)
        addons.seed_stochastic_rounding(self.session, two_uint32_to_uint64(*map(int, seed)))

    def _count_tokens(self, batches: Sequence[Batch]) -> list[tuple[int, int]]:
        """Count all tokens and target tokens of each global batch, over all processes."""
        unique = [self._sharding.drop_replicated_samples(batch) for batch in batches]
        local = [
            [self._family.sample_format.count_non_padding_tokens(b), self._objective.normalizer(b)]
            for b in unique
        ]
        totals = np.sum(popdist.all_gather_object(local), axis=0).tolist()
        return [(tokens, targets) for tokens, targets in totals]

    def _arrange_batch(
        self, batch: Batch, target_tokens: int, length_program: LengthProgram[TrainingProgram]
    ) -> dict[str, np.ndarray]:
        """Arrange samples by stream, as arrays (micro-batches, local replicas, ...)."""
        c, local = self.config, self._sharding.local_replicas
        samples = length_program.crop(self._family.sample_format.to_program_inputs(batch))
        arrays = {n: self._sharding.distribute_to_replicas(x) for n, x in samples.items()}
        share = c.gradient_accumulation * c.execution.data_parallel
        weight = share / max(target_tokens, 1)
        shape = (c.gradient_accumulation, local.stop - local.start)
        arrays[LOSS_WEIGHT] = np.full(shape, weight, np.float32)
        return arrays

    def _arrange_per_step(self, values: np.ndarray) -> np.ndarray:
        """Arrange per-step values for a stream: (steps, ...) -> (transfers, local replicas, ...).

        A stream has a transfer for each micro-batch; those after the steps are never loaded.
        """
        local = self._sharding.local_replicas
        transfers = self.program.ir.num_host_transfers
        shape = (transfers, local.stop - local.start, *values.shape[1:])
        out = np.zeros(shape, values.dtype)
        out[: len(values)] = values[:, None]
        return out

    def _step_seeds(self, first_step: int) -> np.ndarray:
        """Random seeds, uint32 (transfers, local replicas, 2), equal in tensor-parallel groups."""
        from popxl.random_seed import counter_seeds

        c = self.config
        steps = range(first_step, first_step + c.execution.device_iterations)
        copies = c.execution.data_parallel
        per_step = [counter_seeds(c.model.seed, step, copies) for step in steps]
        out = self._arrange_per_step(np.zeros((len(per_step), 2), np.uint32))
        all_replicas = np.repeat(np.stack(per_step), c.execution.tensor_parallel, axis=1)
        out[: len(per_step)] = all_replicas[:, self._sharding.local_replicas]
        return out

    def _step_results(
        self,
        program: TrainingProgram,
        outputs: Mapping[popxl.DeviceToHostStream, np.ndarray],
        counts: Sequence[tuple[int, int]],
        batches: Sequence[Batch],
    ) -> list[StepResult]:
        c = self.config
        n, replicas = c.execution.device_iterations, c.num_replicas
        losses = outputs[program.loss].reshape(n, c.gradient_accumulation, replicas)
        norms = outputs[program.grad_norm].reshape(-1, replicas)[:n, 0]
        means = losses.astype(np.float64).mean(axis=(1, 2))
        aux_metrics = self._aux_metrics(program, outputs, means, counts, batches)
        by_expert = self._expert_metrics(program, outputs, n)
        steps = zip(means, norms, counts, aux_metrics, by_expert, strict=True)
        return [StepResult(float(x), float(norm), *n, a | b) for x, norm, n, a, b in steps]

    def _aux_metrics(
        self,
        program: TrainingProgram,
        outputs: Mapping[popxl.DeviceToHostStream, np.ndarray],
        means: np.ndarray,
        counts: Sequence[tuple[int, int]],
        batches: Sequence[Batch],
    ) -> list[dict[str, Any]]:
        """Compute the training objective's metrics besides the loss, for each step."""
        stream = program.aux_outputs.get(LOSS_STATS)
        objective, sharding = self._objective, self._sharding
        if stream is None:
            return [{} for _ in batches]
        local = list[MetricSums]()
        for sums, batch in zip(np.split(outputs[stream], len(batches)), batches, strict=True):
            from sessions.aux_metrics import compute_metric_sums

            local.append(
                compute_metric_sums(
                    objective, sharding, sharding.gather_in_batch_order(sums), batch
                )
            )
        by_process = popdist.all_gather_object(local)
        totals = [reduce(add_metric_sums, tallies) for tallies in zip(*by_process, strict=True)]
        aux_metrics = list[dict[str, Any]]()
        for tally, mean, (_, normalizer) in zip(totals, means, counts, strict=True):
            totals_of_step = {**tally, "loss": (mean * normalizer, normalizer)}
            values = {name: metric(totals_of_step) for name, metric in objective.metrics.items()}
            aux_metrics.append({name: value for name, value in values.items() if name != "loss"})
        return aux_metrics

    def _expert_metrics(
        self,
        program: TrainingProgram,
        outputs: Mapping[popxl.DeviceToHostStream, np.ndarray],
        steps: int,
    ) -> list[dict[str, float]]:
        """Compute load and balancing loss of the experts for each step; empty without experts."""
        stream = program.aux_outputs.get(EXPERT_USAGE)
        if stream is None:
            return [{} for _ in range(steps)]
        group = self.config.execution.tensor_parallel  # of replicas with equal counts
        usage = outputs[stream].reshape(steps, -1, self.config.num_replicas, *stream.shape)
        from sessions.aux_metrics import expert_metrics

        return [expert_metrics(x.reshape(-1, *stream.shape)) for x in usage[:, :, ::group]]


def build_placed_program(config: RunConfig, build: Build) -> TrainingProgram:
    """Build a training program, and place its entries where devices have memory of their own.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    desc, instances = resolve_device_desc(config), popdist.getNumInstances()
    memory = popxl.plan.device_memory(desc, config.num_replicas, instances)
    if memory is None or not plans_placement(config):
        return build(default_variant(config))
    from planning.placement_search import build_best_program

    return build_best_program(config, build, memory)
