"""How training uses the memory of devices: which state and activations stay there, and which layers
keep their activations. Chosen by simulated runs of the programs there are; results are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import popdist
import popxl
from config.machines import Machine, machine, machine_of_kind
from config.run import Device
from config.sections import RunConfig
from machine.devices import device_desc
from machine.placement import host_room
from modelling.phases.training import TrainingProgram, build_training
from modelling.spec import family_of
from popxl import hardware
from terminal.screen import say

_SPARE_HOST = 0.1  # of the free memory, for whatever else runs there
_MIN_SHARE = 0.02  # of the operations: kinds of layers that are worth a simulation
_SHARES = (0.5,), (0.25, 0.75)  # of a kind's layers, tried in turn
_LEAST_MARGIN = 0.05  # of a device's memory, in place of a plan's margin, where the host is full
_TRIES = 5  # to place entries, each in what the ones before it left
_MIN_GAIN = 0.01  # of the time: what is no faster does not take more memory

Kept = frozenset[tuple[str, float]]
"""Phases or kinds of layers, and which fraction of their layers, the last ones, keep their
activations."""

ALL_AGAIN: Kept = frozenset()
"""All layers compute their activations again."""

Build = Callable[[Mapping[str, float]], TrainingProgram]
"""Builds a program in which that fraction of the layers of these phases keep their activations."""


class Candidates:
    """Training programs that differ in which layers keep their activations; each is built once.

    Args:
        target: that they are traced for.
    """

    def __init__(self, build: Build, target: str) -> None:
        self._build, self._target = build, target
        self._found: dict[Kept, tuple[TrainingProgram, popxl.plan.Traced]] = {}
        self._on: Any = None
        self._trials: dict[Kept, Trial] = {}

    def get(self, keeping: Kept = ALL_AGAIN) -> tuple[TrainingProgram, popxl.plan.Traced]:
        """The program in which layers of phases keep their activations."""
        if keeping not in self._found:
            program = self._build(dict(keeping))
            self._found[keeping] = program, popxl.plan.trace(program.ir, self._target)
        return self._found[keeping]

    def trials(self, on: Any) -> dict[Kept, Trial]:
        """What was tried on such a machine, by what kinds of layers keep, to add to; on another
        machine it begins anew."""
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

    def build(keeping: Mapping[str, float]) -> TrainingProgram:
        return build_training(there, family.layout, table=table, keeping=keeping)

    return Candidates(build, target)


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
        kept: the kinds of layers that keep their activations, and how many of them.
        fits: whether there is room in the memories of device and host.
    """

    kept: Kept
    program: TrainingProgram
    traced: popxl.plan.Traced
    placement: popxl.plan.Placement
    fits: bool

    @property
    def seconds(self) -> float:
        """How long a simulated run takes."""
        return self.placement.after.seconds

    @property
    def title(self) -> str:
        """Which layers keep their activations."""
        kinds = [kind if share == 1 else f"{share:.0%} of {kind}" for kind, share in self.kept]
        return f"kept by {' and '.join(sorted(kinds))}" if kinds else "computed again"


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

    Where the configuration leaves it open (`execution.activations` auto), kinds of layers keep
    their activations one after the other, that first which saves most, as long as it saves time;
    then only some of a kind's layers, where that is better: what is kept travels to the host and
    back, which the rest of the step may hide for some and not for all.

    Args:
        memory: bytes of a device for the program; default: the machine's.
        host: bytes of host memory for a replica; default: its share of the machine's.
    """
    rates = on.reached_rates(config.model.precision, config.replicas)
    room, share = memory or on.room, host or _host_share(config, on)
    search = _Search(candidates, rates, room, share, config.execution.disk is not None)
    kinds: list[str] = []
    if config.execution.activations == "auto" and search.best.traced.storage().remote <= share:
        kinds = _worthwhile(*candidates.get())  # more that is kept takes more room still
    left = kinds
    while left and search.improves([search.best.kept | {(kind, 1.0)} for kind in left]):
        left = [kind for kind in left if (kind, 1.0) not in search.best.kept]
    for kind in kinds:
        for shares in () if kind in search.best.program.undivided else _SHARES:
            others = {(name, share) for name, share in search.best.kept if name != kind}
            if not search.improves([frozenset(others | {(kind, share)}) for share in shares]):
                break
    return Chosen(search.best, search.tried)


class _Search:
    """Simulated runs of programs that differ in what layers keep, and the best of them.

    Args:
        memory, host: bytes of a device, and of host memory for a replica.
        has_disk: whether a disk has room for what the host has not.
    """

    def __init__(
        self,
        candidates: Candidates,
        rates: popxl.plan.Rates,
        memory: float,
        host: float,
        has_disk: bool,
    ) -> None:
        self._candidates, self._rates, self._memory, self._host = candidates, rates, memory, host
        has_room = self._has_room(candidates.get()[1])
        self._squeezes = has_room and not has_disk  # where host memory lacks little
        self._known = candidates.trials((rates, memory, host, self._squeezes))
        self.best = self._trial(ALL_AGAIN)
        self.tried = [self.best]

    def improves(self, trials: Sequence[Kept]) -> bool:
        """Whether one of these is better; it is the best then."""
        made = [self._trial(kept) for kept in trials if self._has_room(self._program(kept)[1])]
        if not made:
            return False
        self.tried.extend(made)
        fastest = min(made, key=lambda one: (not one.fits, one.seconds))
        if not fastest.fits or fastest.seconds > (1 - _MIN_GAIN) * self.best.seconds:
            return False
        self.best = fastest
        return True

    def _trial(self, kept: Kept) -> Trial:
        if kept not in self._known:
            self._known[kept] = self._simulated(kept)
        return self._known[kept]

    def _simulated(self, kept: Kept) -> Trial:
        program, traced = self._program(kept)
        placement, fits = self._placed(traced, popxl.plan.MARGIN)
        lacks = traced.storage().remote - self._host
        if self._squeezes and not kept and 0 < lacks < popxl.plan.MARGIN * self._memory:
            placement, fits = self._placed(traced, _LEAST_MARGIN)
        return Trial(kept, program, traced, placement, fits)

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
            if taken == besides or (on_device and (on_host or not self._has_room(traced))):
                break
            besides, hosted = taken, placement.hosted
        return placement, on_device and on_host

    def _program(self, kept: Kept) -> tuple[TrainingProgram, popxl.plan.Traced]:
        layers = self._candidates.get()[0].layers
        return self._candidates.get(
            frozenset((name, share) for kind, share in kept for name in layers[kind])
        )

    def _has_room(self, traced: popxl.plan.Traced) -> bool:
        """Whether device and host could hold its entries."""
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
        return build({})
    kind = hardware.device_kinds(desc, config.replicas, instances)[0]
    known = machine_of_kind(kind)
    room = (host_room(config) or 2**63) * (1 - _SPARE_HOST) / (config.replicas // instances)
    memory, room = (min(popdist.gather(each)) for each in (memory, room))  # all choose alike
    candidates = Candidates(build, "gpu" if known is None else known.target)
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
    activations = f"activations are {chosen.title}; " if chosen.kept else ""
    before, after = placement.before.seconds, placement.after.seconds
    return (
        f"placement: {kept or 'nothing'} in device memory; {activations}a simulated run takes "
        f"{after:.2f} s (everything in host memory: {before:.2f} s)"
    )
