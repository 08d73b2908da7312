"""Variants of a training program, which give the same results, and trials of them on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import popxl
from config.run import Device
from config.sections import RunConfig
from modelling.devices import platform
from modelling.phases.settings import ALL
from modelling.phases.training import TrainingProgram, build_training
from modelling.spec import get_family

_MIN_SHARE = 0.02  # of the operations: kinds of layers that are worth a simulation
MIN_GAIN = 0.01  # of the time: what is no faster does not take more memory
HIDDEN = 0.01  # of the time: where less is spent on waits, larger passes are not tried

RematPolicy = frozenset[tuple[str, float]]
"""Phases or kinds of layers, and which fraction of their layers, the last ones, keep their
activations."""

RECOMPUTE_ALL: RematPolicy = frozenset()
"""All layers compute their activations again."""

SAVE_ALL: RematPolicy = frozenset({(ALL, 1.0)})
"""All layers save their activations."""


@dataclass(frozen=True)
class Variant:
    """A program of a configuration; all variants give the same results.

    Attributes:
        per_pass: micro-batches per pass (`execution.micro_batches_per_pass`).
        kept: the phases or kinds of layers that save activations.
        changes: fields of `execution`, and values to take in place of the configuration's.
    """

    per_pass: int
    kept: RematPolicy = RECOMPUTE_ALL
    changes: tuple[tuple[str, Any], ...] = ()

    def apply_to(self, config: RunConfig) -> RunConfig:
        """The configuration with its changes."""
        return replace(config, execution=replace(config.execution, **dict(self.changes)))


Build = Callable[[Variant], TrainingProgram]
"""Builds the program of a variant, whose `kept` names phases."""


class ProgramVariants:
    """Training programs of a configuration; each variant is built once.

    Args:
        first: the variant that runs where nothing is planned.
        target: that they are traced for.
    """

    def __init__(self, build: Build, first: Variant, target: str) -> None:
        self._build, self._first, self._target = build, first, target
        self._found: dict[Variant, tuple[TrainingProgram, popxl.plan.TracedProgram]] = {}
        self._on: Any = None
        self._trials: dict[Variant, Trial] = {}

    def get(
        self, variant: Variant | None = None
    ) -> tuple[TrainingProgram, popxl.plan.TracedProgram]:
        """The program of a variant; default: of the first one."""
        variant = variant or self._first
        if variant not in self._found:
            program = self._build(variant)
            self._found[variant] = program, popxl.plan.trace(program.ir, self._target)
        return self._found[variant]

    def trials(self, on: Any) -> dict[Variant, Trial]:
        """What was tried on such a machine, by variant, whose `kept` names kinds of layers, to add
        to; on another machine it begins anew."""
        if self._on != on:
            self._on, self._trials = on, {}
        return self._trials


class VariantCache:
    """The candidates for configurations: those of one that is chosen are there for its plan."""

    def __init__(self) -> None:
        self._made: list[tuple[RunConfig, str, ProgramVariants]] = []

    def variants(self, config: RunConfig, target: str) -> ProgramVariants:
        """The candidates for a configuration, traced for a machine (`Machine.target`)."""
        for known, traced_platform, variants in self._made:
            if (known, traced_platform) == (config, target):
                return variants
        self._made.append((config, target, _build_variants(config, target)))
        return self._made[-1][2]


def _build_variants(config: RunConfig, target: str) -> ProgramVariants:
    family, there = get_family(config), with_target_device(config, target)
    weight_map = family.weight_map(config)

    def build(variant: Variant) -> TrainingProgram:
        saved_fractions, per_pass, own = (
            dict(variant.kept),
            variant.per_pass,
            variant.apply_to(there),
        )
        return build_training(
            own,
            family.build_phases,
            weight_map=weight_map,
            saved_fractions=saved_fractions,
            per_pass=per_pass,
        )

    return ProgramVariants(build, default_variant(there), target)


def default_variant(config: RunConfig) -> Variant:
    """The variant that runs where no plan chooses.

    On one CPU device, which shares the host's memory, weights are where the layers need them: each
    micro-batch passes alone, and saves its activations. Not so where weights come from a disk or
    are dequantized for each pass.
    """
    one = platform(config) == "cpu" and config.replicas == 1
    loads = config.execution.disk is not None or config.model.quant is not None
    per_pass = config.execution.micro_batches_per_pass
    if per_pass == "auto":
        per_pass = 1 if one and not loads else config.gradient_accumulation
    return Variant(per_pass, SAVE_ALL if one and per_pass == 1 else RECOMPUTE_ALL)


def with_target_device(config: RunConfig, target: str) -> RunConfig:
    """The configuration as it runs on a machine that need not be here."""
    execution = config.execution
    if execution.device != "auto":
        return config
    device = cast(Device, target.partition(" ")[0])
    return replace(config, execution=replace(execution, device=device))


@dataclass(frozen=True)
class Trial:
    """A program on a machine, its entries placed.

    Attributes:
        variant: its `kept` names kinds of layers.
        fits: whether there is room in the memories of device and host.
        is_filled: whether placing its entries again gains nothing.
    """

    variant: Variant
    program: TrainingProgram
    traced: popxl.plan.TracedProgram
    placement: popxl.plan.Placement
    fits: bool
    is_filled: bool = False

    @property
    def seconds(self) -> float:
        """How long a simulated run takes."""
        return self.placement.timeline.seconds

    @property
    def is_bound_by_compute(self) -> bool:
        """Whether all layers save activations, and the device waits for next to nothing."""
        saved = {(kind, 1.0) for kind in layer_types_worth_saving(self.program, self.traced)}
        return self.fits and saved <= self.variant.kept and self.waits <= HIDDEN * self.seconds

    @property
    def waits(self) -> float:
        """Seconds in which the device waits for entries."""
        return sum(waits.transfers for waits in self.placement.timeline.exposed.values())

    def is_faster_than(self, other: Trial, gain: float = MIN_GAIN) -> bool:
        """Whether it alone fits, or takes less time by more than a fraction."""
        if self.fits != other.fits:
            return self.fits
        return self.seconds < (1 - gain) * other.seconds

    @property
    def title(self) -> str:
        """Micro-batches per pass, and which layers save their activations."""
        of = self.variant.kept
        kinds = [kind if share == 1 else f"{share:.0%} of {kind}" for kind, share in of]
        saved = f"activations saved by {' and '.join(sorted(kinds))}" if kinds else "recomputed"
        changed = (f"{name} {str(value).lower()}" for name, value in self.variant.changes)
        return ", ".join([f"{self.variant.per_pass} micro-batches per pass", saved, *changed])


def layer_types_worth_saving(
    program: TrainingProgram, traced: popxl.plan.TracedProgram
) -> list[str]:
    """Kinds of layers whose forward pass is a share of the work that counts."""
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
