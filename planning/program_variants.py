"""Variants of a training program (same results, other time and memory), and their trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import popxl
from config.run import Device
from config.sections import RunConfig
from modelling.devices import resolve_platform
from modelling.model_family import get_family
from modelling.phases.settings import ALL
from modelling.phases.training import TrainingProgram, build_training_program

_MIN_SHARE = 0.02  # smallest fraction of the FLOPs of layer types that are worth a simulation
MIN_GAIN = 0.01  # smallest fraction of the time that is worth more memory
HIDDEN = 0.01  # fraction of the time: transfers with shorter waits count as hidden

RematPolicy = frozenset[tuple[str, float]]
"""Pairs of a phase or layer type and the fraction of its layers, the last ones, that save their
activations; all others recompute them."""

PhasesByType = Mapping[str, Sequence[str]]

RECOMPUTE_ALL: RematPolicy = frozenset()
"""All layers recompute their activations."""

SAVE_ALL: RematPolicy = frozenset({(ALL, 1.0)})
"""All layers save their activations."""


def plans_placement(config: RunConfig) -> bool:
    """Return True if the planner chooses the remote-buffer entries that stay on the device."""
    execution = config.execution
    return execution.placement == "auto" and not execution.resident_layers


@dataclass(frozen=True)
class ProgramVariant:
    """Options of a training program that change its time and memory, but not its results.

    Attributes:
        per_pass: micro-batches per pass (`execution.micro_batches_per_pass`).
        saved_layers: the phases or layer types that save activations.
        saves_matmul_inputs: see `PhaseSettings`.
        changes: fields of `execution` and their values, which replace the configuration's.
    """

    per_pass: int
    saved_layers: RematPolicy = RECOMPUTE_ALL
    changes: tuple[tuple[str, Any], ...] = ()
    saves_matmul_inputs: bool = False

    def equals_but_for_saved_layers(self, other: ProgramVariant) -> bool:
        """Return True if at most the layers that save their activations differ."""
        return self == replace(other, saved_layers=self.saved_layers)

    def saves_more_than(self, other: ProgramVariant) -> bool:
        """Return True if the layers that save activations in `other` do, and more of them."""
        saved = dict(self.saved_layers)
        saves_those = all(share <= saved.get(name, 0) for name, share in other.saved_layers)
        return saves_those and self != other and self.equals_but_for_saved_layers(other)

    def apply_to(self, config: RunConfig) -> RunConfig:
        """Return a configuration with the variant's options."""
        return replace(config, execution=replace(config.execution, **dict(self.changes)))


Build = Callable[[ProgramVariant], TrainingProgram]
"""Builds the program of a variant whose `saved_layers` names phases."""


class ProgramVariants:
    """Cache of the programs of one configuration, by variant; each is built and traced once.

    Args:
        first: the variant without a plan.
        target: target for which they are traced.
        phases_by_type: names of phases by layer type, if known; else those of the first variant.
    """

    def __init__(
        self,
        build: Build,
        first: ProgramVariant,
        target: str,
        phases_by_type: PhasesByType | None = None,
    ) -> None:
        self._build, self._first, self._target = build, first, target
        self._phases_by_type = phases_by_type
        self._built: dict[ProgramVariant, tuple[TrainingProgram, popxl.plan.TracedProgram]] = {}
        self._machine: Any = None
        self._trials: dict[ProgramVariant, PlacementTrial] = {}

    def get_program(
        self, variant: ProgramVariant | None = None
    ) -> tuple[TrainingProgram, popxl.plan.TracedProgram]:
        """Return the program and trace of a variant; default: the first variant."""
        variant = variant or self._first
        if variant not in self._built:
            program = self._build(variant)
            self._built[variant] = program, popxl.plan.trace_program(program.ir, self._target)
        return self._built[variant]

    @property
    def phases_by_type(self) -> PhasesByType:
        """Names of the phases whose layers can save their activations, by layer type."""
        return self._phases_by_type or self.get_program()[0].phases_by_type

    def variant_of(self, traced: popxl.plan.TracedProgram) -> ProgramVariant:
        """Return the program variant of a trace that `get_program` returned."""
        return next(variant for variant, (_, t) in self._built.items() if t is traced)

    def trials(self, machine: Any) -> dict[ProgramVariant, PlacementTrial]:
        """Return the dict of trials on a machine, by variant with layer types, to be extended.

        For another machine they are empty again.
        """
        if self._machine != machine:
            self._machine, self._trials = machine, {}
        return self._trials


class VariantCache:
    """Cache of the `ProgramVariants` of several configurations, for layouts and batch sizes."""

    def __init__(self) -> None:
        self._entries: list[tuple[RunConfig, str, ProgramVariants]] = []

    def variants(
        self, config: RunConfig, target: str, like: TrainingProgram | None = None
    ) -> ProgramVariants:
        """Return the variants of a configuration, traced for `target` (`Machine.target`).

        Args:
            like: a program with the same phases; without it, one is built to know them.
        """
        for cached, cached_target, variants in self._entries:
            if (cached, cached_target) == (config, target):
                return variants
        phases = None if like is None else like.phases_by_type
        self._entries.append((config, target, _build_variants(config, target, phases)))
        return self._entries[-1][2]


def _build_variants(
    config: RunConfig, target: str, phases_by_type: PhasesByType | None
) -> ProgramVariants:
    family, on_target = get_family(config), with_target_device(config, target)
    weight_map, teacher_head = family.weight_map(config), None
    if config.training.has_teacher_head:
        from planning.teacher_config import make_teacher_head  # other objectives do without

        teacher_head = make_teacher_head(on_target)

    def build(variant: ProgramVariant) -> TrainingProgram:
        return build_training_program(
            variant.apply_to(on_target),
            family.build_phases,
            weight_map=weight_map,
            saved_fractions=dict(variant.saved_layers),
            per_pass=variant.per_pass,
            teacher_head=teacher_head,
            saves_matmul_inputs=variant.saves_matmul_inputs,
        )

    return ProgramVariants(build, default_variant(on_target), target, phases_by_type)


def default_variant(config: RunConfig) -> ProgramVariant:
    """Return the program variant that runs if the configuration is not planned.

    A single CPU device shares the host's memory, so passes do not load weights: a pass takes one
    micro-batch and saves its activations. Weights on disk and quantized ones are loaded for each
    pass, so there a pass takes all micro-batches.
    """
    is_single_cpu = resolve_platform(config) == "cpu" and config.num_replicas == 1
    loads_weights = config.execution.disk is not None or config.model.quant is not None
    per_pass = config.micro_batches_per_pass
    if per_pass == "auto":
        per_pass = 1 if is_single_cpu and not loads_weights else config.gradient_accumulation
    return ProgramVariant(per_pass, SAVE_ALL if is_single_cpu and per_pass == 1 else RECOMPUTE_ALL)


def with_target_device(config: RunConfig, target: str) -> RunConfig:
    """Replace the device "auto" of a configuration by the platform of a hardware target.

    The target need not be the local machine.
    """
    execution = config.execution
    if execution.device != "auto":
        return config
    device = cast(Device, target.partition(" ")[0])
    return replace(config, execution=replace(execution, device=device))


@dataclass(frozen=True)
class PlacementTrial:
    """A simulated run of one program variant on a machine: its placement and its timeline.

    Attributes:
        variant: its `saved_layers` names layer types.
        fits: true if it fits the memory of device and host.
        is_filled: true if placing its entries again gains nothing.
    """

    variant: ProgramVariant
    program: TrainingProgram
    traced: popxl.plan.TracedProgram
    placement: popxl.plan.Placement
    fits: bool
    is_filled: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the simulated run."""
        return self.placement.timeline.seconds

    @property
    def is_bound_by_compute(self) -> bool:
        """True if all activations are saved and computation hides all transfers."""
        saved = {(kind, 1.0) for kind in layer_types_faster_saved(self.program, self.traced)}
        return (
            self.fits and saved <= self.variant.saved_layers and self.waits <= HIDDEN * self.seconds
        )

    @property
    def waits(self) -> float:
        """Seconds in which the device is idle because it waits for transfers."""
        return sum(exposed.transfers for exposed in self.placement.timeline.exposed.values())

    def is_faster_than(self, other: PlacementTrial, gain: float = MIN_GAIN) -> bool:
        """Return True if only this trial fits memory, or if it is faster by the fraction `gain`."""
        if self.fits != other.fits:
            return self.fits
        return self.seconds < (1 - gain) * other.seconds

    @property
    def title(self) -> str:
        """Text that names the variant: micro-batches per pass, and layers that save activations."""
        types = [
            name if share == 1 else f"{share:.0%} of {name}"
            for name, share in self.variant.saved_layers
        ]
        saved = f"activations saved by {' and '.join(sorted(types))}" if types else "recomputed"
        if self.variant.saves_matmul_inputs:
            saved += " with inputs of matmuls"
        changes = (f"{name} {str(value).lower()}" for name, value in self.variant.changes)
        return ", ".join([f"{self.variant.per_pass} micro-batches per pass", saved, *changes])


def layer_types_faster_saved(
    program: TrainingProgram, traced: popxl.plan.TracedProgram
) -> list[str]:
    """Return the layer types whose forward pass has a large enough share of the FLOPs."""
    flops: Counter[str] = Counter()
    kinds: Mapping[str, str] = {
        n: kind for kind, names in program.phases_by_type.items() for n in names
    }
    for part in traced.plan().parts:
        phase, _, direction = part.name.partition("/")
        flops["all"] += part.flops
        if direction == "forward" and phase in kinds:
            flops[kinds[phase]] += part.flops
    return [kind for kind in program.phases_by_type if flops[kind] > _MIN_SHARE * flops["all"]]
