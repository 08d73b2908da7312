"""How training uses the memory of devices: how many micro-batches pass the layers together, which
layers save their activations, and which entries stay on the device. Chosen by simulated runs of the
programs there are; results are the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf
from typing import Any, Self

import popdist
import popxl
from config.sections import RunConfig
from modelling.devices import device_desc
from modelling.phases.training import TrainingProgram
from planning.hardware.disk_offload import usable_host_bytes
from planning.hardware.machines import Machine, machine, machine_for_device_kind
from planning.program_variants import (
    HIDDEN,
    RECOMPUTE_ALL,
    Build,
    ProgramVariants,
    RematPolicy,
    Trial,
    Variant,
    default_variant,
    layer_types_worth_saving,
)
from popxl import hardware
from terminal.screen import say

_SPARE_HOST = 0.1  # of the free memory, for whatever else runs there
_SHARES = (0.5,), (0.25, 0.75)  # of a kind's layers, tried in turn
_SLICES = 2, 4, 8  # of the queries
_TRIES = 5  # to place entries, each in what the ones before it left
_TRIM = 1e-3  # of the time: what loads ahead of their use may take longer with less memory
_LEAST = 2**26  # bytes of loads ahead that are not worth a simulation
_FILL_GAIN = 1e-3  # of the time: a further placement takes seconds
_PASS_GAIN = 0.05  # of the time: several passes save less than simulated (an H200: XL, FP8, Llama)


@dataclass(frozen=True)
class PlacementResult:
    """The fastest program that fits, and all that were tried."""

    best: Trial
    tried: Sequence[Trial]


def plans_placement(config: RunConfig) -> bool:
    """Whether the plan decides where entries live."""
    execution = config.execution
    return execution.placement == "auto" and not execution.resident_layers


def search_placement(
    variants: ProgramVariants,
    config: RunConfig,
    on: Machine,
    memory: float | None = None,
    host: float | None = None,
) -> PlacementResult:
    """Choose a training program for a machine, and place its entries.

    Where the configuration leaves it open (`execution.micro_batches_per_pass` auto), one pass of
    all micro-batches is tried, then one micro-batch per pass, and twice as many as long as that is
    faster, up to a number that saves all activations and hides all transfers. Several passes have
    to be faster than one by `_PASS_GAIN`.

    Args:
        memory: bytes of a device for the program; default: the machine's.
        host: bytes of host memory for a replica; default: its share of the machine's.
    """
    search = PlacementSearch.on(on, variants, config, memory, host)
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
    best = search.filled(_with_auto(search, config, best))
    trimmed = search.trimmed(best)
    return PlacementResult(trimmed, [trimmed if each is best else each for each in search.tried])


def run_trial(
    variants: ProgramVariants, config: RunConfig, on: Machine, variant: Variant | None = None
) -> Trial:
    """A variant on a machine; default: the one that `search_placement` begins with, one pass of all
    micro-batches or of as many as are given, and activations are recomputed."""
    variant = variant or Variant(_numbers_per_pass(config)[1])
    return PlacementSearch.on(on, variants, config).trial(variant)


def _with_auto(search: PlacementSearch, config: RunConfig, best: Trial) -> Trial:
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


def try_without_memory_options(
    variants: ProgramVariants, config: RunConfig, on: Machine, chosen: Trial
) -> Trial | None:
    """The same program without values that were given and save memory alone, where it fits."""
    execution, fields = config.execution, dict[str, Any]()
    if execution.rts_activations is True and execution.tensor_parallel > 1:
        fields["rts_activations"] = False
    if execution.attention_slices > 1:
        fields["attention_serialisation"] = 1
    if not fields:
        return None
    other = run_trial(variants, config, on, _changed(chosen, **fields))
    return other if other.fits else None


def _numbers_per_pass(config: RunConfig) -> tuple[list[int], int]:
    """Micro-batches per pass to try in turn, each twice the one before, and the most to try."""
    given, count = config.execution.micro_batches_per_pass, config.gradient_accumulation
    if given != "auto":
        return [], given
    if config.execution.disk is not None:  # each pass would read what is there
        return [], count
    doubled = takewhile(lambda n: n < count, (2**i for i in itertools.count()))
    return [n for n in doubled if count % n == 0], count


class PlacementSearch:
    """Simulated runs of variants.

    Args:
        memory, host: bytes of a device, and of host memory for a replica.
    """

    def __init__(
        self,
        variants: ProgramVariants,
        rates: popxl.plan.Rates,
        config: RunConfig,
        memory: float,
        host: float,
    ) -> None:
        self._config = config
        self._variants, self._rates, self._memory, self._host = variants, rates, memory, host
        self._known = variants.trials((rates, memory, host))
        self.tried: list[Trial] = []

    @classmethod
    def on(
        cls,
        machine: Machine,
        variants: ProgramVariants,
        config: RunConfig,
        memory: float | None = None,
        host: float | None = None,
    ) -> Self:
        """A search on a machine; arguments as for `search_placement`."""
        rates = machine.achieved_rates(config.model.precision, config.replicas)
        host = host or _host_share(config, machine)
        return cls(variants, rates, config, memory or machine.usable_bytes, host)

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
        kinds = left = layer_types_worth_saving(best.program, best.traced)
        every = self._faster(best, [frozenset((kind, 1.0) for kind in kinds)])
        if every is not best and every.waits <= max(best.waits, HIDDEN * every.seconds):
            return every
        while left:
            better = self._faster(best, [best.variant.kept | {(kind, 1.0)} for kind in left])
            if better is best:
                break
            best = better
            left = [kind for kind in left if (kind, 1.0) not in best.variant.kept]
        for kind in kinds:
            for shares in () if kind in best.program.all_or_none_types else _SHARES:
                others = {(name, share) for name, share in best.variant.kept if name != kind}
                some = [frozenset(others | {(kind, share)}) for share in shares]
                better = self._faster(best, some)
                if better is best:
                    break
                best = better
        return best

    def _faster(self, best: Trial, kept: Sequence[RematPolicy]) -> Trial:
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
        several = variant.per_pass < self._config.gradient_accumulation
        window = traced.window // 2 if several else None
        best = Trial(variant, program, traced, *self._placed(traced, window))
        while several and self._may_gain(best):
            narrower = replace(best, **self._narrower(best))
            if not narrower.is_faster_than(best):
                best.placement.apply()
                break
            best = narrower
        return best

    def _may_gain(self, trial: Trial) -> bool:
        """True if more memory might make a trial the fastest so far."""
        if not trial.fits:
            return True
        if trial.waits <= HIDDEN * trial.seconds:
            return False
        known = [other.seconds for other in self.tried if other.fits]
        return trial.seconds - trial.waits < min(known, default=inf)

    def _narrower(self, trial: Trial) -> dict[str, Any]:
        """The placement of a trial with half the memory for loads ahead of their use: several
        passes move state in one of them alone, and leave most of it idle."""
        before = trial.placement
        window = before.timeline.window // 2
        other_bytes = before.timeline.extent - before.nbytes - window
        placement, fits = self._placed(trial.traced, window, other_bytes, before.all_host)
        return {"placement": placement, "fits": fits}

    def filled(self, best: Trial) -> Trial:
        """A trial with more entries on the device, as long as that is faster and there is room:
        what stays there is not on its way, so that a run takes less besides than with all entries
        in host memory."""
        while best.fits and not best.is_filled:
            before, best = best, self._filled(best)
            self._known[best.variant] = best
            self.tried = [best if one is before else one for one in self.tried]
        return best

    def _filled(self, best: Trial) -> Trial:
        before = best.placement
        if all(kind.entries == kind.of for kind in before.kinds):
            return replace(best, is_filled=True)
        other_bytes = before.timeline.extent - before.nbytes
        more = popxl.plan.place(
            best.traced,
            self._rates,
            int(self._memory),
            other_bytes,
            before.all_host,
            before.timeline.window,
        )
        other = replace(best, placement=more)
        if all(self._fits(best.traced, more)) and other.is_faster_than(best, _FILL_GAIN):
            return other
        before.apply()
        return replace(best, is_filled=True)

    def trimmed(self, trial: Trial) -> Trial:
        """A trial whose loads run no farther ahead than hides them."""
        best = trial.placement
        while best.timeline.loads and best.timeline.window > _LEAST:
            narrower = best.with_window(best.timeline.window // 2, self._rates)
            is_slower = narrower.timeline.seconds > (1 + _TRIM) * trial.seconds
            if is_slower or narrower.timeline.extent > best.timeline.extent:
                best.apply()
                break
            best = narrower
        return replace(trial, placement=best)

    def _placed(
        self,
        traced: popxl.plan.TracedProgram,
        window: int | None = None,
        other_bytes: int | None = None,
        all_host: popxl.plan.AllHostRun | None = None,
    ) -> tuple[popxl.plan.Placement, bool]:
        """Its entries placed, and whether there is room; arguments as for `popxl.plan.place`."""
        for _ in range(_TRIES):  # what travels less takes more memory, or less
            memory = int(self._memory)
            placement = popxl.plan.place(traced, self._rates, memory, other_bytes, all_host, window)
            taken = max(other_bytes or 0, placement.timeline.extent - placement.nbytes)
            on_device, on_host = self._fits(traced, placement)
            if taken == other_bytes or (on_device and (on_host or not self._holds(traced))):
                break
            other_bytes, all_host = taken, placement.all_host
        return placement, on_device and on_host

    def _program(self, variant: Variant) -> tuple[TrainingProgram, popxl.plan.TracedProgram]:
        """The program of a variant whose `kept` names kinds."""
        again = replace(variant, kept=RECOMPUTE_ALL)
        if not variant.kept:
            return self._variants.get(again)
        layers = self._variants.get(again)[0].phases_by_type
        phases = ((name, share) for kind, share in variant.kept for name in layers[kind])
        return self._variants.get(replace(variant, kept=frozenset(phases)))

    def has_room(self, variant: Variant) -> bool:
        """Whether device and host could hold the entries of a variant."""
        return self._holds(self._program(variant)[1])

    def _holds(self, traced: popxl.plan.TracedProgram) -> bool:
        return _entries(traced) <= self._memory + self._host

    def _fits(
        self, traced: popxl.plan.TracedProgram, placement: popxl.plan.Placement
    ) -> tuple[bool, bool]:
        """Whether device and host have room."""
        stored = traced.storage()
        on_device = stored.on_device + placement.timeline.extent
        return on_device <= (1 - popxl.plan.MARGIN) * self._memory, stored.remote <= self._host


def may_fit(variants: ProgramVariants, config: RunConfig, on: Machine) -> bool:
    """Whether device and host could hold the entries of a program, wherever they are placed."""
    return _entries(variants.get()[1]) <= on.usable_bytes + _host_share(config, on)


def _entries(traced: popxl.plan.TracedProgram) -> int:
    """Bytes of all entries of a program."""
    stored = traced.storage()
    return stored.remote + stored.resident + stored.disk


def _host_share(config: RunConfig, on: Machine) -> float:
    """Bytes of host memory for a replica."""
    return on.host_memory / min(config.replicas, on.devices or config.replicas)


def build_best_program(config: RunConfig, build: Build) -> TrainingProgram:
    """Build a training program and place its entries on the devices that are here, and say what was
    chosen. Where the configuration decides, or devices share the host's memory, nothing is placed.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    desc, instances = device_desc(config), popdist.getNumInstances()
    memory = popxl.plan.device_memory(desc, config.replicas, instances)
    if memory is None or not plans_placement(config):
        return build(default_variant(config))
    kind = hardware.device_kinds(desc, config.replicas, instances)[0]
    known = machine_for_device_kind(kind)
    room = (usable_host_bytes(config) or 2**63) * (1 - _SPARE_HOST) / (config.replicas // instances)
    memory, room = (
        min(popdist.all_gather_object(each)) for each in (memory, room)
    )  # all choose alike
    target = "gpu" if known is None else known.target
    variants = ProgramVariants(build, default_variant(config), target)
    choice = search_placement(variants, config, known or machine("h100"), memory, room)
    say(format_placement(choice.best) + ("" if known else f" ({kind} is unknown: as for an H100)"))
    return choice.best.program


def format_placement(chosen: Trial) -> str:
    """A line: what stays on the device, and what that is expected to save."""
    placement = chosen.placement
    kept = ", ".join(
        f"{kind.nbytes / 1e9:.1f} GB of {kind.label}"
        for kind in sorted(placement.kinds, key=lambda kind: -kind.nbytes)
        if kind.nbytes >= 5e7
    )
    before, after = placement.all_host_timeline.seconds, placement.timeline.seconds
    return (
        f"placement: {kept or 'nothing'} in device memory; {chosen.title}; a simulated run takes "
        f"{after:.2f} s (everything in host memory: {before:.2f} s)"
    )
