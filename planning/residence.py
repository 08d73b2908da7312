"""How training uses the memory of devices: how many micro-batches pass the layers together, which
layers save their activations, and which entries stay on the device. Chosen by simulated runs of the
programs there are; results are the same."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

import popdist
import popxl
from config.machines import Machine, machine, machine_of_kind
from config.run import Device
from config.sections import RunConfig
from machine.devices import device_desc, platform
from machine.placement import host_room
from modelling.phases.settings import ALL
from modelling.phases.training import TrainingProgram, build_training
from modelling.spec import family_of
from popxl import hardware
from terminal.screen import say

_SPARE_HOST = 0.1  # of the free memory, for whatever else runs there
_MIN_SHARE = 0.02  # of the operations: kinds of layers that are worth a simulation
_SHARES = (0.5,), (0.25, 0.75)  # of a kind's layers, tried in turn
_LEAST_MARGIN = 0.05  # of a device's memory, in place of a plan's margin, where the host is full
_SLICES = 2, 4, 8  # of the queries
_TRIES = 5  # to place entries, each in what the ones before it left
_MIN_GAIN = 0.01  # of the time: what is no faster does not take more memory
_HIDDEN = 0.01  # of the time: where less is spent on waits, larger passes are not tried
_PASS_GAIN = 0.05  # of the time: several passes save less than simulated (an H200: XL, FP8, Llama)

Kept = frozenset[tuple[str, float]]
"""Phases or kinds of layers, and which fraction of their layers, the last ones, keep their
activations."""

ALL_AGAIN: Kept = frozenset()
"""All layers compute their activations again."""

ALL_SAVED: Kept = frozenset({(ALL, 1.0)})
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
    kept: Kept = ALL_AGAIN
    changes: tuple[tuple[str, Any], ...] = ()

    def applied(self, config: RunConfig) -> RunConfig:
        """The configuration with its changes."""
        return replace(config, execution=replace(config.execution, **dict(self.changes)))


Build = Callable[[Variant], TrainingProgram]
"""Builds the program of a variant, whose `kept` names phases."""


class Candidates:
    """Training programs of a configuration; each variant is built once.

    Args:
        first: the variant that runs where nothing is planned.
        target: that they are traced for.
    """

    def __init__(self, build: Build, first: Variant, target: str) -> None:
        self._build, self._first, self._target = build, first, target
        self._found: dict[Variant, tuple[TrainingProgram, popxl.plan.Traced]] = {}
        self._on: Any = None
        self._trials: dict[Variant, Trial] = {}

    def get(self, variant: Variant | None = None) -> tuple[TrainingProgram, popxl.plan.Traced]:
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


class Programs:
    """The candidates for configurations: those of one that is chosen are there for its plan."""

    def __init__(self) -> None:
        self._made: list[tuple[RunConfig, str, Candidates]] = []

    def of(self, config: RunConfig, target: str) -> Candidates:
        """The candidates for a configuration, traced for a machine (`Machine.target`)."""
        for known, traced_for, candidates in self._made:
            if (known, traced_for) == (config, target):
                return candidates
        self._made.append((config, target, _candidates(config, target)))
        return self._made[-1][2]


def _candidates(config: RunConfig, target: str) -> Candidates:
    family, there = family_of(config), on_platform(config, target)
    table = family.weights(config)

    def build(variant: Variant) -> TrainingProgram:
        keeping, per_pass, own = dict(variant.kept), variant.per_pass, variant.applied(there)
        return build_training(own, family.layout, table=table, keeping=keeping, per_pass=per_pass)

    return Candidates(build, unplanned(there), target)


def unplanned(config: RunConfig) -> Variant:
    """The variant that runs where no plan chooses.

    On one CPU device, which shares the host's memory, weights are where the layers need them: each
    micro-batch passes alone, and saves its activations. Not so where weights come from a disk or
    are dequantized for each pass.
    """
    one = platform(config) == "cpu" and config.replicas == 1
    loads = config.execution.disk is not None or config.model.few_bits is not None
    per_pass = config.execution.micro_batches_per_pass
    if per_pass == "auto":
        per_pass = 1 if one and not loads else config.gradient_accumulation
    return Variant(per_pass, ALL_SAVED if one and per_pass == 1 else ALL_AGAIN)


def on_platform(config: RunConfig, target: str) -> RunConfig:
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
    """

    variant: Variant
    program: TrainingProgram
    traced: popxl.plan.Traced
    placement: popxl.plan.Placement
    fits: bool

    @property
    def seconds(self) -> float:
        """How long a simulated run takes."""
        return self.placement.after.seconds

    @property
    def is_bound_by_compute(self) -> bool:
        """Whether all layers save activations, and the device waits for next to nothing."""
        saved = {(kind, 1.0) for kind in _worthwhile(self.program, self.traced)}
        return self.fits and saved <= self.variant.kept and self.waits <= _HIDDEN * self.seconds

    @property
    def waits(self) -> float:
        """Seconds in which the device waits for entries."""
        return sum(waits.transfers for waits in self.placement.after.exposed.values())

    def is_faster_than(self, other: Trial, gain: float = _MIN_GAIN) -> bool:
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


@dataclass(frozen=True)
class Chosen:
    """The fastest program that fits, and all that were tried."""

    best: Trial
    tried: Sequence[Trial]


def is_automatic(config: RunConfig) -> bool:
    """Whether the plan decides where entries live."""
    execution = config.execution
    return execution.placement == "auto" and not execution.resident_layers


def choose(
    candidates: Candidates,
    config: RunConfig,
    on: Machine,
    memory: float | None = None,
    host: float | None = None,
) -> Chosen:
    """Choose a training program for a machine, and place its entries.

    Where the configuration leaves it open (`execution.micro_batches_per_pass` auto), one pass of
    all micro-batches is tried, then one micro-batch per pass, and twice as many as long as that is
    faster, up to a number that saves all activations and hides all transfers. Several passes have
    to be faster than one by `_PASS_GAIN`.

    Args:
        memory: bytes of a device for the program; default: the machine's.
        host: bytes of host memory for a replica; default: its share of the machine's.
    """
    rates = on.reached_rates(config.model.precision, config.replicas)
    room, share = memory or on.room, host or _host_share(config, on)
    search = _Search(candidates, rates, config, room, share)
    fewer, whole = _numbers_per_pass(config)
    best = search.saving(whole)
    several: Trial | None = None
    for per_pass in filter(lambda n: search.has_room(Variant(n)), fewer):
        found = search.saving(per_pass)
        if several is None or found.is_faster_than(several):
            several = found
        if several.is_bound_by_compute or several is not found:
            break
    if several is not None and several.is_faster_than(best, _PASS_GAIN):
        best = several
    return Chosen(_with_auto(search, config, best), search.tried)


def _with_auto(search: _Search, config: RunConfig, best: Trial) -> Trial:
    """A trial with values of fields that are "auto": whole activations between layers where they
    are faster, slices of the queries where a single sample does not fit otherwise. Fewer samples at
    once are faster than slices."""
    execution = config.execution
    if execution.rts_activations == "auto" and execution.tensor_parallel > 1:
        best = search.faster(best, [_changed(best, rts_activations=False)])
    if execution.attention_serialisation != "auto" or execution.micro_batch_size > 1:
        return best
    for slices in _SLICES:
        if not best.fits and config.model.sequence_length % slices == 0:
            best = search.faster(best, [_changed(best, attention_serialisation=slices)])
    return best


def _changed(trial: Trial, **fields: Any) -> Variant:
    return replace(trial.variant, changes=(*trial.variant.changes, *fields.items()))


def instead_of_given(
    candidates: Candidates, config: RunConfig, on: Machine, chosen: Trial
) -> Trial | None:
    """The same program without values that were given and save memory alone, where it fits."""
    execution, fields = config.execution, dict[str, Any]()
    if execution.rts_activations is True and execution.tensor_parallel > 1:
        fields["rts_activations"] = False
    if execution.attention_slices > 1:
        fields["attention_serialisation"] = 1
    if not fields:
        return None
    rates = on.reached_rates(config.model.precision, config.replicas)
    search = _Search(candidates, rates, config, on.room, _host_share(config, on))
    trial = search.trial(_changed(chosen, **fields))
    return trial if trial.fits else None


def _numbers_per_pass(config: RunConfig) -> tuple[list[int], int]:
    """Micro-batches per pass to try in turn, each twice the one before, and the most to try."""
    given, count = config.execution.micro_batches_per_pass, config.gradient_accumulation
    if given != "auto":
        return [], given
    if config.execution.disk is not None:  # each pass would read what is there
        return [], count
    doubled = takewhile(lambda n: n < count, (2**i for i in itertools.count()))
    return [n for n in doubled if count % n == 0], count


class _Search:
    """Simulated runs of variants.

    Args:
        memory, host: bytes of a device, and of host memory for a replica.
    """

    def __init__(
        self,
        candidates: Candidates,
        rates: popxl.plan.Rates,
        config: RunConfig,
        memory: float,
        host: float,
    ) -> None:
        self._config = config
        self._candidates, self._rates, self._memory, self._host = candidates, rates, memory, host
        has_room = self.has_room(Variant(_numbers_per_pass(config)[1]))
        self._squeezes = has_room and config.execution.disk is None  # where the host lacks little
        self._known = candidates.trials((rates, memory, host, self._squeezes))
        self.tried: list[Trial] = []

    def saving(self, per_pass: int) -> Trial:
        """The best trial with so many micro-batches per pass.

        Where the configuration leaves it open (`execution.activations` auto), all layers save
        activations, if that fits; else kinds of layers save them one after the other, that first
        which saves most time; then only some layers of a kind, where that is better: what is saved
        travels to the host and back, which the rest of the step may hide for some and not for all.
        """
        best = self.trial(Variant(per_pass))
        fits_host = best.traced.storage().remote <= self._host
        if (
            self._config.execution.activations == "auto" and fits_host
        ):  # what is saved takes more still
            return self._with_activations(best)
        return best

    def _with_activations(self, best: Trial) -> Trial:
        kinds = left = _worthwhile(best.program, best.traced)
        every = self._faster(best, [frozenset((kind, 1.0) for kind in kinds)])
        if every is not best and every.waits <= max(best.waits, _HIDDEN * every.seconds):
            return every
        while left:
            better = self._faster(best, [best.variant.kept | {(kind, 1.0)} for kind in left])
            if better is best:
                break
            best = better
            left = [kind for kind in left if (kind, 1.0) not in best.variant.kept]
        for kind in kinds:
            for shares in () if kind in best.program.undivided else _SHARES:
                others = {(name, share) for name, share in best.variant.kept if name != kind}
                some = [frozenset(others | {(kind, share)}) for share in shares]
                better = self._faster(best, some)
                if better is best:
                    break
                best = better
        return best

    def _faster(self, best: Trial, kept: Sequence[Kept]) -> Trial:
        """The fastest of variants of a trial that save other activations; itself, if none is."""
        return self.faster(best, [replace(best.variant, kept=each) for each in kept])

    def faster(self, best: Trial, variants: Sequence[Variant]) -> Trial:
        """The fastest of some variants; the best so far, if none is faster."""
        made = [self.trial(one) for one in variants if self.has_room(one)]
        fastest = min(made, key=lambda one: (not one.fits, one.seconds), default=best)
        return fastest if fastest.is_faster_than(best) else best

    def trial(self, variant: Variant) -> Trial:
        """A variant on the machine; each is simulated once."""
        if variant not in self._known:
            self._known[variant] = self._simulated(variant)
        if self._known[variant] not in self.tried:
            self.tried.append(self._known[variant])
        return self._known[variant]

    def _simulated(self, variant: Variant) -> Trial:
        program, traced = self._program(variant)
        placement, fits = self._placed(traced, popxl.plan.MARGIN)
        lacks = traced.storage().remote - self._host
        little = 0 < lacks < popxl.plan.MARGIN * self._memory
        if self._squeezes and not variant.kept and little:
            placement, fits = self._placed(traced, _LEAST_MARGIN)
        return Trial(variant, program, traced, placement, fits)

    def _placed(
        self, traced: popxl.plan.Traced, margin: float
    ) -> tuple[popxl.plan.Placement, bool]:
        """Its entries placed, and whether there is room."""
        besides: int | None = None
        hosted: popxl.plan.Hosted | None = None
        for _ in range(_TRIES):  # what travels less takes more memory, or less
            memory = int(self._memory)
            placement = popxl.plan.place(traced, self._rates, memory, besides, hosted, margin)
            taken = max(besides or 0, placement.after.peak - placement.nbytes)
            on_device, on_host = self._fits(traced, placement)
            if taken == besides or (on_device and (on_host or not self._holds(traced))):
                break
            besides, hosted = taken, placement.hosted
        return placement, on_device and on_host

    def _program(self, variant: Variant) -> tuple[TrainingProgram, popxl.plan.Traced]:
        """The program of a variant whose `kept` names kinds."""
        again = replace(variant, kept=ALL_AGAIN)
        if not variant.kept:
            return self._candidates.get(again)
        layers = self._candidates.get(again)[0].layers
        phases = ((name, share) for kind, share in variant.kept for name in layers[kind])
        return self._candidates.get(replace(variant, kept=frozenset(phases)))

    def has_room(self, variant: Variant) -> bool:
        """Whether device and host could hold the entries of a variant."""
        return self._holds(self._program(variant)[1])

    def _holds(self, traced: popxl.plan.Traced) -> bool:
        return _entries(traced) <= self._memory + self._host

    def _fits(
        self, traced: popxl.plan.Traced, placement: popxl.plan.Placement
    ) -> tuple[bool, bool]:
        """Whether device and host have room."""
        stored = traced.storage()
        on_device = stored.on_device + placement.after.peak
        return on_device <= self._memory, stored.remote <= self._host


def fits_some_way(candidates: Candidates, config: RunConfig, on: Machine) -> bool:
    """Whether device and host could hold the entries of a program, wherever they are placed."""
    return _entries(candidates.get()[1]) <= on.room + _host_share(config, on)


def _entries(traced: popxl.plan.Traced) -> int:
    """Bytes of all entries of a program."""
    stored = traced.storage()
    return stored.remote + stored.resident + stored.disk


def _host_share(config: RunConfig, on: Machine) -> float:
    """Bytes of host memory for a replica."""
    return on.host_memory / min(config.replicas, on.devices or config.replicas)


def _worthwhile(program: TrainingProgram, traced: popxl.plan.Traced) -> list[str]:
    """Kinds of layers whose forward pass is a share of the work that counts."""
    flops: Counter[str] = Counter()
    kinds: Mapping[str, str] = {n: kind for kind, names in program.layers.items() for n in names}
    for part in traced.plan().parts:
        phase, _, direction = part.name.partition("/")
        flops["all"] += part.flops
        if direction == "forward" and phase in kinds:
            flops[kinds[phase]] += part.flops
    return [kind for kind in program.layers if flops[kind] > _MIN_SHARE * flops["all"]]


def program_here(config: RunConfig, build: Build) -> TrainingProgram:
    """Build a training program and place its entries on the devices that are here, and say what was
    chosen. Where the configuration decides, or devices share the host's memory, nothing is placed.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    desc, instances = device_desc(config), popdist.getNumInstances()
    memory = popxl.plan.device_memory(desc, config.replicas, instances)
    if memory is None or not is_automatic(config):
        return build(unplanned(config))
    kind = hardware.device_kinds(desc, config.replicas, instances)[0]
    known = machine_of_kind(kind)
    room = (host_room(config) or 2**63) * (1 - _SPARE_HOST) / (config.replicas // instances)
    memory, room = (min(popdist.gather(each)) for each in (memory, room))  # all choose alike
    target = "gpu" if known is None else known.target
    candidates = Candidates(build, unplanned(config), target)
    choice = choose(candidates, config, known or machine("h100"), memory, room)
    say(described(choice.best) + ("" if known else f" ({kind} is unknown: as for an H100)"))
    return choice.best.program


def described(chosen: Trial) -> str:
    """A line: what stays on the device, and what that is expected to save."""
    placement = chosen.placement
    kept = ", ".join(
        f"{kind.nbytes / 1e9:.1f} GB of {kind.label}"
        for kind in sorted(placement.kinds, key=lambda kind: -kind.nbytes)
        if kind.nbytes >= 5e7
    )
    before, after = placement.before.seconds, placement.after.seconds
    return (
        f"placement: {kept or 'nothing'} in device memory; {chosen.title}; a simulated run takes "
        f"{after:.2f} s (everything in host memory: {before:.2f} s)"
    )
