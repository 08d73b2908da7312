"""The requirements of a configured model's program: memory, training state and FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import popxl
from config.memory_lower_bound import ITEM_BYTES
from config.sections import RunConfig
from modelling.model_family import get_family
from modelling.objectives import Objective
from modelling.phases.evaluation import build_loss_program, evaluated_weight_map, loss_config
from modelling.weights import WeightMap
from modelling.weights.weight_mapping import is_adapter, is_quantizable
from planning.hardware.disk_offload import offload_to_disk
from planning.hardware.machines import Machine
from planning.placement_search import PlacementResult, search_placement
from planning.program_variants import (
    ProgramVariants,
    VariantCache,
    plans_placement,
    with_target_device,
)


@dataclass(frozen=True)
class Requirements:
    """Memory, transfers and FLOPs of a traced program, with the sizes of its model.

    Attributes:
        kind: "finetuning", "inference", "evaluation" of losses, or the pass of a "teacher".
        traced: the traced program, for its timeline.
        parameters: number of parameters of the model.
        state: bytes of weights, and in training of gradients, moments and master weights, once.
        samples: samples of a run, over all replicas.
        tokens: tokens of these samples, padding included; of generation, the largest number of new
            tokens.
        moments: bytes of the moments.
        streamed: true for generation with streamed weights.
        variants: variants of a training program.
        placement_result: result of the placement search.
    """

    kind: str
    config: RunConfig
    traced: popxl.plan.TracedProgram
    plan: popxl.plan.Plan
    parameters: int
    state: int
    samples: int
    tokens: int
    moments: int = 0
    streamed: bool = False
    variants: ProgramVariants | None = None
    placement_result: PlacementResult | None = None

    @property
    def placement(self) -> popxl.plan.Placement | None:
        """Placement of remote-buffer entries that the plan chose; None without a plan."""
        return None if self.placement_result is None else self.placement_result.best.placement

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of matrix products per sample, recomputation included."""
        return self.plan.flops * self.plan.replicas / self.samples


def plan_on_machine(requirements: Requirements, machine: Machine) -> Requirements:
    """Plan a program on a machine: choose the entries that stay on the device, or go to disk."""
    config, has_device_memory = requirements.config, machine.platform != "cpu"
    if requirements.variants is not None and has_device_memory and plans_placement(config):
        result = search_placement(requirements.variants, config, machine)
        traced = result.best.traced
        requirements = replace(
            requirements, traced=traced, plan=traced.plan(), placement_result=result
        )
    if config.execution.disk is not None:
        free_bytes = usable_host_bytes_on(config, machine)
        replicas = min(config.num_replicas, machine.devices or config.num_replicas)
        used_bytes = 0 if has_device_memory else requirements.plan.device_bytes * replicas
        offload_to_disk(requirements.traced.ir, int(free_bytes) - used_bytes, replicas)
        requirements = replace(requirements, plan=requirements.traced.plan())
    return requirements


def usable_host_bytes_on(config: RunConfig, machine: Machine) -> float:
    """Return the host memory in bytes that a run may use on a machine."""
    limit = config.execution.host_memory
    return machine.host_memory if limit is None else min(limit * 1e9, machine.host_memory)


def finetuning_requirements(
    config: RunConfig, target: str = "cpu", programs: VariantCache | None = None
) -> Requirements:
    """Return the requirements of fine-tuning, traced for `target` (`Machine.target`).

    Args:
        programs: cache of traced programs.
    """
    family = get_family(config)
    weight_map = family.weight_map(config)
    variants = (programs or VariantCache()).variants(config, target)
    _, traced = variants.get_program()
    count = _parameter_count(weight_map)
    shapes = [weight.shape for weight in weight_map.trainable_weights]
    slots = [
        (slot, weight.shape)
        for mapping in weight_map.mappings
        if mapping.is_updated
        for weight in mapping.weights
        for slot in config.optimizer_slots(len(weight.shape), mapping.is_adapter)
    ]
    master = config.master_weight_slot
    moments = sum(slot.nbytes(shape) for slot, shape in slots if slot != master)
    masters = sum(slot.nbytes(shape) for slot, shape in slots if slot == master)
    gradients = ITEM_BYTES[config.training.gradient_dtype] * sum(map(math.prod, shapes))
    state = _weight_bytes(config, weight_map) + gradients + moments + masters
    samples = config.training.global_batch_size * config.execution.device_iterations
    tokens = samples * tokens_per_sample(config)
    sizes = (count, state, samples, tokens, moments)
    return Requirements("finetuning", config, traced, traced.plan(), *sizes, variants=variants)


def generation_requirements(config: RunConfig, target: str = "cpu") -> Requirements:
    """Return the requirements of generation, traced for `target` (`Machine.target`)."""
    config = replace(config, model=replace(config.model, eval=True))
    family, on_target = get_family(config), with_target_device(config, target)
    streamed = config.generation.weights == "streamed"
    # Training does without.
    from modelling.generation import build_resident_program, build_streamed_program
    from modelling.generation.decoding_strategy import strategy_from_config

    strategy, weight_map = strategy_from_config(config), family.weight_map(config)
    if streamed:
        program = build_streamed_program(on_target, family.generator, weight_map, strategy)
    else:
        program = build_resident_program(on_target, family.generator, strategy)
    execution, count = config.execution, _parameter_count(weight_map)
    batches = program.ir.num_host_transfers * execution.data_parallel
    traced = popxl.plan.trace_program(program.ir, target)
    return Requirements(
        "inference",
        config,
        traced,
        traced.plan(),
        count,
        _weight_bytes(config, weight_map),
        batches * execution.micro_batch_size,
        batches * math.prod(program.tokens.shape),
        streamed=streamed,
    )


def evaluation_requirements(config: RunConfig, target: str = "cpu") -> Requirements:
    """Return the requirements of generation, or of losses if the model writes no text."""
    if config.training.head == "lm":
        return generation_requirements(config, target)
    return loss_requirements("evaluation", loss_config(config), target)


def loss_requirements(
    kind: str, config: RunConfig, target: str, objective: Objective | None = None
) -> Requirements:
    """Return the requirements of computing losses over a batch.

    Args:
        kind: see `Requirements`.
        config: see `modelling.phases.evaluation.loss_config`.
        objective: what is computed in place of the config's objective; None: that.
    """
    family = get_family(config)
    weight_map = evaluated_weight_map(family.weight_map(config), objective)
    on_target = with_target_device(config, target)
    program = build_loss_program(on_target, family.build_phases, weight_map, objective)
    traced = popxl.plan.trace_program(program.ir, target)
    samples = config.training.global_batch_size
    return Requirements(
        kind,
        config,
        traced,
        traced.plan(),
        _parameter_count(weight_map),
        _weight_bytes(config, weight_map),
        samples,
        samples * tokens_per_sample(config),
    )


def weight_bytes(config: RunConfig) -> int:
    """Return the bytes that all of a model's weights take in generation."""
    config = replace(config, model=replace(config.model, eval=True))
    return _weight_bytes(config, get_family(config).weight_map(config))


def streamed_requirements(requirements: Requirements, target: str) -> Requirements | None:
    """Return the requirements of generation with streamed weights; None if they are not "auto"."""
    config = requirements.config
    if requirements.kind != "inference" or config.generation.weights != "auto":
        return None
    generation = replace(config.generation, weights="streamed")
    return generation_requirements(replace(config, generation=generation), target)


def tokens_per_sample(config: RunConfig) -> int:
    """Return the tokens of a sample: encoder and decoder together, padding included."""
    model = config.model
    return model.sequence_length + int(getattr(model, "decoder_sequence_length", 0))


def _parameter_count(weight_map: WeightMap) -> int:
    """Return the number of parameters in a weight map."""
    return sum(math.prod(weight.shape) for weight in weight_map.weights)


def _weight_bytes(config: RunConfig, weight_map: WeightMap) -> int:
    """Return the bytes of all weights of a weight map; adapter weights are float32."""
    adapter_weights, model = _parameter_count(weight_map.filter_mappings(is_adapter)), config.model
    item = popxl.dtype.from_name(model.precision).itemsize
    total = (_parameter_count(weight_map) - adapter_weights) * item + adapter_weights * 4
    if model.quant is None or model.eval:
        return total
    quantized = _parameter_count(
        weight_map.filter_mappings(is_quantizable)
    )  # with two numbers of 16 bits for each group
    quantized_bytes = quantized * model.quant.bits // 8 + quantized * 4 // model.quant.group_size
    return total - quantized * item + quantized_bytes
