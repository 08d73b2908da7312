"""Search of the fastest placement of variables in device, host and disk memory, by simulated runs.

It chooses the micro-batches per pass, which layers save or recompute their activations
(`planning.recompute_search`), and which entries stay on the device (`popxl.plan.place_entries`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf
from typing import Any, Self

import popdist
import popxl
from config.sections import RunConfig
from modelling.devices import resolve_device_desc
from modelling.phases.training import TrainingProgram
from planning.hardware.disk_offload import usable_host_bytes
from planning.hardware.machines import Machine, machine, machine_for_device_kind
from planning.program_variants import (
    HIDDEN,
    MIN_GAIN,
    RECOMPUTE_ALL,
    Build,
    PlacementTrial,
    ProgramVariant,
    ProgramVariants,
    RematPolicy,
    default_variant,
    layer_types_faster_saved,
)
from popxl import hardware
from terminal.screen import say

_SPARE_HOST = 0.1  # fraction of the free host memory for other programs
_CHUNKS = 2, 4, 8  # numbers of chunks of the queries to try
_TRIES = 5  # attempts to place entries, each with the memory that the last run left
_TRIM = 1e-3  # fraction of the time by which a smaller prefetch window may be slower
_LEAST = 2**26  # bytes: smaller prefetch windows are not worth a simulation
_INPUTS_GAIN = 2e-3  # fraction of the time: what is saved is written anyway
_FILL_GAIN = 1e-3  # fraction of the time: a further placement takes seconds
_PASS_GAIN = 0.05  # fraction of the time: several passes save less than simulated (on an H200)
# Of variants that are faster than recomputing (tests/planning/test_estimates.py):
_OVERESTIMATE = 1.15  # estimates are at most so many times the simulated seconds
_SPREAD = 1.08  # and the ratio of the two is at most so many times that of recomputing


@dataclass(frozen=True)
class PlacementResult:
    """Result of a placement search: the fastest trial that fits memory, and all trials.

    Attributes:
        left_out: number of variants that were not simulated, since they cannot be faster.
    """

    best: PlacementTrial
    tried: Sequence[PlacementTrial]
    left_out: int = 0


@popxl.plan.gc_disabled()
def search_placement(
    variants: ProgramVariants,
    config: RunConfig,
    target_machine: Machine,
    memory: float | None = None,
    host: float | None = None,
) -> PlacementResult:
    """Choose a training program's fastest variant for a machine, and place its variables.

    With `execution.micro_batches_per_pass` auto, it tries one pass of all micro-batches, then one
    micro-batch per pass, and twice as many as long as that is faster, up to a number that saves all
    activations and hides all transfers. Where it is bound by compute then, layers also save the
    inputs of matmuls, if that is faster. Several passes need to be faster than one by `_PASS_GAIN`.

    Args:
        memory: bytes of a device for the program; default: the machine's.
        host: bytes of host memory of a replica; default: its share of the machine's.
    """
    search = PlacementSearch.for_machine(target_machine, variants, config, memory, host)
    smaller, largest = _candidate_micro_batches_per_pass(config)
    best = search.find_best_remat(largest)
    search.limit_seconds((1 - _PASS_GAIN) * best.seconds if best.fits else inf)
    several: PlacementTrial | None = None
    if smaller and not search.may_be_faster(best, smaller[0]):
        search.left_out.update(map(ProgramVariant, smaller))
        smaller = []
    for per_pass in filter(lambda n: search.may_fit_device(ProgramVariant(n)), smaller):
        trial = search.find_best_remat(per_pass)
        if several is None or trial.is_faster_than(several):
            several = trial
        if several.is_bound_by_compute or several is not trial:
            break
    if several is not None and several.is_faster_than(best, _PASS_GAIN):
        best = several
    search.limit_seconds(inf)
    best = _resolve_auto_options(search, config, best)
    if best.variant.saved_layers and best.is_bound_by_compute:
        best = search.find_fastest(
            best, [replace(best.variant, saves_matmul_inputs=True)], _INPUTS_GAIN
        )
    best = search.fill_device_memory(best)
    trimmed = search.trim_resident_entries(best)
    tried = [trimmed if trial is best else trial for trial in search.tried]
    return PlacementResult(trimmed, tried, len(search.left_out - {t.variant for t in tried}))


def first_variant(config: RunConfig) -> ProgramVariant:
    """Return the first variant of `search_placement`, which recomputes all activations.

    It has one pass of all micro-batches, or the configured number.
    """
    return ProgramVariant(_candidate_micro_batches_per_pass(config)[1])


@popxl.plan.gc_disabled()
def simulate_trial(
    variants: ProgramVariants,
    config: RunConfig,
    target_machine: Machine,
    variant: ProgramVariant | None = None,
) -> PlacementTrial:
    """Simulate a run of one variant of a training program on a machine.

    The default is `first_variant`.
    """
    variant = variant or first_variant(config)
    return PlacementSearch.for_machine(target_machine, variants, config).simulate_variant(variant)


@popxl.plan.gc_disabled()
def simulate_fastest_trial(
    variants: ProgramVariants,
    config: RunConfig,
    target_machine: Machine,
    candidates: Sequence[ProgramVariant],
    limit: float = inf,
) -> PlacementTrial | None:
    """Simulate variants of a training program on a machine, and return the fastest trial.

    It is one that `search_placement` could choose: several passes are faster than one by
    `_PASS_GAIN`.

    Args:
        candidates: the first one should be likely; others that cannot be faster are not simulated.
        limit: seconds; a first candidate that computes for longer is not simulated, nor are the
            others.
    """
    search = PlacementSearch.for_machine(target_machine, variants, config)
    if search.busy_seconds(candidates[0]) >= limit:
        return None
    best = search.find_fastest(search.simulate_variant(candidates[0]), candidates[1:])
    largest = _candidate_micro_batches_per_pass(config)[1]
    if best.seconds >= limit:
        return None
    if best.variant.per_pass < largest:
        search.limit_seconds(best.seconds / (1 - _PASS_GAIN) if best.fits else inf)
        one_pass = search.find_best_remat(largest)
        best = best if best.is_faster_than(one_pass, _PASS_GAIN) else one_pass
    return search.fill_device_memory(best)


def _resolve_auto_options(
    search: PlacementSearch, config: RunConfig, best: PlacementTrial
) -> PlacementTrial:
    """Return the best trial, after trials of other values of execution options that are "auto".

    These are full activations between layers, if faster, and chunks of the queries if a single
    sample does not fit without: fewer samples are faster than chunks.
    """
    execution = config.execution
    if execution.rts_activations == "auto" and execution.tensor_parallel > 1:
        best = search.find_fastest(best, [_with_execution_fields(best, rts_activations=False)])
    if execution.attention_serialisation != "auto" or execution.micro_batch_size > 1:
        return best
    for chunks in _CHUNKS:
        if not best.fits and config.model.sequence_length % chunks == 0:
            best = search.find_fastest(
                best, [_with_execution_fields(best, attention_serialisation=chunks)]
            )
    return best


def _with_execution_fields(trial: PlacementTrial, **fields: Any) -> ProgramVariant:
    """Return a trial's program variant with other values of `execution` fields."""
    return replace(trial.variant, changes=(*trial.variant.changes, *fields.items()))


def try_without_memory_options(
    variants: ProgramVariants, config: RunConfig, target_machine: Machine, best: PlacementTrial
) -> PlacementTrial | None:
    """Simulate the best variant without options that only save memory; None if it does not fit."""
    execution, fields = config.execution, dict[str, Any]()
    if execution.rts_activations is True and execution.tensor_parallel > 1:
        fields["rts_activations"] = False
    if execution.num_query_chunks > 1:
        fields["attention_serialisation"] = 1
    if not fields:
        return None
    other = simulate_trial(variants, config, target_machine, _with_execution_fields(best, **fields))
    return other if other.fits else None


def _candidate_micro_batches_per_pass(config: RunConfig) -> tuple[list[int], int]:
    """Return the numbers of micro-batches per pass to try in turn, and the largest one."""
    configured, count = config.micro_batches_per_pass, config.gradient_accumulation
    if configured != "auto":
        return [], configured
    if config.execution.disk is not None:  # each pass would read the entries on disk
        return [], count
    doubled = takewhile(lambda n: n < count, (2**i for i in itertools.count()))
    return [n for n in doubled if count % n == 0], count


class PlacementSearch:
    """Simulates program variants with their remote-buffer entries placed; caches the results.

    Args:
        memory: bytes of a device.
        host: bytes of host memory of a replica.
        one_memory: see `Machine`.
    """

    def __init__(
        self,
        variants: ProgramVariants,
        rates: popxl.plan.Rates,
        config: RunConfig,
        memory: float,
        host: float,
        one_memory: bool = False,
    ) -> None:
        self._config, self._one_memory = config, one_memory
        self._variants, self._rates, self._memory, self._host = variants, rates, memory, host
        self._known = variants.trials((rates, memory, host))
        self._limit = inf
        self._placed_seconds: dict[ProgramVariant, float] = {}
        self._busy_seconds: dict[ProgramVariant, tuple[float, float]] = {}
        self.tried: list[PlacementTrial] = []
        self.left_out: set[ProgramVariant] = set()

    @classmethod
    def for_machine(
        cls,
        machine: Machine,
        variants: ProgramVariants,
        config: RunConfig,
        memory: float | None = None,
        host: float | None = None,
    ) -> Self:
        """Create a search on a machine; arguments as for `search_placement`."""
        rates = machine.achieved_rates(config.model.precision, config.num_replicas)
        host = host or _host_bytes_per_process(config, machine)
        memory = memory or machine.usable_bytes
        return cls(variants, rates, config, memory, host, machine.one_memory)

    def limit_seconds(self, seconds: float) -> None:
        """Simulate only variants that can take less than `seconds` from now on."""
        self._limit = seconds

    def may_be_faster(self, trial: PlacementTrial, per_pass: int) -> bool:
        """Return False if passes of `per_pass` micro-batches cannot beat the limit.

        Not even with all activations saved, which takes device and host the least time.
        """
        policy = RECOMPUTE_ALL
        if self._config.execution.activations == "auto":
            types = layer_types_faster_saved(trial.program, trial.traced)
            policy = frozenset((name, 1.0) for name in types)
        return not trial.fits or self.busy_seconds(ProgramVariant(per_pass, policy)) < self._limit

    def find_best_remat(self, per_pass: int) -> PlacementTrial:
        """Return the fastest trial over sets of saved activations, at `per_pass` micro-batches.

        With `execution.activations` auto it searches the layers that save their activations.
        """
        best = self.simulate_variant(ProgramVariant(per_pass))
        fits_host = best.traced.permanent_storage().remote <= self._host
        if self._config.execution.activations == "auto" and fits_host:  # saving takes more memory
            from planning.recompute_search import search_remat_policy

            return search_remat_policy(best, self._fastest_policy)
        return best

    def _fastest_policy(
        self, best: PlacementTrial, policies: Sequence[RematPolicy]
    ) -> PlacementTrial:
        """Return the fastest trial over these choices of saved layers; `best` if none is faster."""
        return self.find_fastest(best, [replace(best.variant, saved_layers=p) for p in policies])

    def find_fastest(
        self, best: PlacementTrial, variants: Collection[ProgramVariant], gain: float = MIN_GAIN
    ) -> PlacementTrial:
        """Return the fastest of these variants' trials; `best` if none gains the fraction `gain`.

        Those with the smallest lower bound come first; ones that cannot be faster than the fastest
        run so far are not simulated.
        """
        fastest = best
        self._placed_bound(best.variant)  # the others wait no shorter
        for variant in sorted(variants, key=self._least_seconds):
            if not self._can_be_faster_than(fastest, variant, gain):
                self.left_out.add(variant)
            elif self.may_fit_device(variant):
                trial = self.simulate_variant(variant)
                fastest = min(fastest, trial, key=lambda t: (not t.fits, t.seconds))
        return fastest if fastest.is_faster_than(best, gain) else best

    def _can_be_faster_than(
        self, fastest: PlacementTrial, variant: ProgramVariant, gain: float
    ) -> bool:
        """Return False if a variant's lower bounds tell that it cannot gain anything."""
        if not fastest.fits:
            return True
        limit = min((1 - gain) * fastest.seconds, self._limit)
        # The bound that takes longest to compute comes last.
        bounds = (self._least_seconds, self.busy_seconds, self._placed_bound)
        return all(bound(variant) < limit for bound in bounds)

    def _least_seconds(self, variant: ProgramVariant) -> float:
        """Return a lower bound of a variant's run, from variants that save fewer activations.

        It computes less than they do, but it waits no shorter: it has at least as much to transfer,
        and less time and memory for it.
        """
        waits = [
            self._placed_bound(other) - self.compute_seconds(other)
            for other in self._placed_seconds
            if variant.saves_more_than(other)
        ]
        return self.compute_seconds(variant) + max(waits, default=0.0)

    def compute_seconds(self, variant: ProgramVariant) -> float:
        """Return the seconds that a variant computes, in however many passes."""
        largest = _candidate_micro_batches_per_pass(self._config)[1]
        return self._compute_and_dispatch_seconds(replace(variant, per_pass=largest))[0]

    def busy_seconds(self, variant: ProgramVariant) -> float:
        """Return the seconds that device or host are busy in a variant's run: a lower bound."""
        return max(self._compute_and_dispatch_seconds(variant))

    def _compute_and_dispatch_seconds(self, variant: ProgramVariant) -> tuple[float, float]:
        if variant not in self._busy_seconds:
            traced = self._program_and_trace(variant)[1]
            self._busy_seconds[variant] = traced.busy_seconds(self._rates)
        return self._busy_seconds[variant]

    def _placed_bound(self, variant: ProgramVariant) -> float:
        """Return a lower bound of a variant's run: an estimate with all entries that can fit.

        Trials of as many micro-batches per pass tell how much estimates differ from simulations.
        """
        known = (t for t in self.tried if t.fits and t.variant.equals_but_for_saved_layers(variant))
        similar = next(known, None)
        ratio = _OVERESTIMATE
        if similar is not None:
            ratio = _SPREAD * self._estimate_placed(similar.variant) / similar.seconds
        return max(self._estimate_placed(variant) / ratio, self.compute_seconds(variant))

    def _estimate_placed(self, variant: ProgramVariant) -> float:
        """Return the estimated seconds of a variant's run, with all other device memory free."""
        if variant not in self._placed_seconds:
            traced = self._program_and_trace(variant)[1]
            used = traced.permanent_storage().fixed_device_bytes + traced.largest_temporary_bytes
            free_bytes = int((1 - popxl.plan.MARGIN) * self._memory) - used
            self._placed_seconds[variant] = popxl.plan.estimate_placed(
                traced, self._estimate(traced), free_bytes
            )
        return self._placed_seconds[variant]

    def _estimate(self, traced: popxl.plan.TracedProgram) -> popxl.plan.StagedTimeEstimate:
        return traced.staged_time_estimate(self._rates, traced.default_prefetch_window)

    def simulate_variant(self, variant: ProgramVariant) -> PlacementTrial:
        """Return the cached or newly simulated trial of a variant."""
        if variant not in self._known:
            self._known[variant] = self._simulate(variant)
        if self._known[variant] not in self.tried:
            self.tried.append(self._known[variant])
        return self._known[variant]

    def _simulate(self, variant: ProgramVariant) -> PlacementTrial:
        """Place the remote-buffer entries of a program variant, and simulate a run."""
        program, traced = self._program_and_trace(variant)
        several = variant.per_pass < self._config.gradient_accumulation
        window = traced.default_prefetch_window // 2 if several else None
        best = PlacementTrial(variant, program, traced, *self._place_entries(traced, window))
        gain = inf
        while several and self._memory_may_help(best, gain):
            narrower = replace(best, **self._halve_window(best))
            if not narrower.is_faster_than(best):
                best.placement.apply()
                break
            gain = best.seconds - narrower.seconds if best.fits else inf
            best = narrower
        return best

    def _memory_may_help(self, trial: PlacementTrial, gain: float) -> bool:
        """Return True if a trial could become the fastest with more memory for its entries.

        Args:
            gain: seconds that the last halving of the window saved, inf if there was none. All
                further halvings together free no more memory.
        """
        if not trial.fits:
            return True
        if trial.waits <= HIDDEN * trial.seconds:
            return False
        fastest = min((other.seconds for other in self.tried if other.fits), default=inf)
        limit = min(fastest, self._limit)
        least = max(trial.seconds - min(trial.waits, gain), self._placed_bound(trial.variant))
        return least < limit

    def _halve_window(self, trial: PlacementTrial) -> dict[str, Any]:
        """Place a trial's entries again, with half the prefetch window; returns changed fields.

        Of several passes only one moves state, so most of the window is idle.
        """
        before = trial.placement
        window = before.timeline.window // 2
        other_bytes = before.timeline.extent - before.nbytes - window
        placement, fits = self._place_entries(trial.traced, window, other_bytes, before.all_host)
        return {"placement": placement, "fits": fits}

    def fill_device_memory(self, best: PlacementTrial) -> PlacementTrial:
        """Keep more remote-buffer entries on the device while that is faster and fits.

        Entries that stay are not transferred, so a run takes less other memory than with all
        entries in host memory.
        """
        while best.fits and not best.is_filled:
            before, best = best, self._fill_device_memory_once(best)
            self._known[best.variant] = best
            self.tried = [best if trial is before else trial for trial in self.tried]
        return best

    def _fill_device_memory_once(self, best: PlacementTrial) -> PlacementTrial:
        """Place entries again, in the device memory that the last trial left free."""
        before = best.placement
        if all(kind.entries == kind.total for kind in before.kinds):
            return replace(best, is_filled=True)
        other_bytes = before.timeline.extent - before.nbytes
        placement = popxl.plan.place_entries(
            best.traced,
            self._rates,
            int(self._memory),
            other_bytes,
            before.all_host,
            before.timeline.window,
        )
        other = replace(best, placement=placement)
        if all(self._fits_device(best.traced, placement)) and other.is_faster_than(
            best, _FILL_GAIN
        ):
            return other
        before.apply()
        return replace(best, is_filled=True)

    def trim_resident_entries(self, trial: PlacementTrial) -> PlacementTrial:
        """Reduce the prefetch window to the smallest one that still hides the loads."""
        best = trial.placement
        while best.timeline.loads and best.timeline.window > _LEAST:
            narrower = best.with_window(best.timeline.window // 2, self._rates)
            is_slower = narrower.timeline.seconds > (1 + _TRIM) * trial.seconds
            if is_slower or narrower.timeline.extent > best.timeline.extent:
                best.apply()
                break
            best = narrower
        return replace(trial, placement=best)

    def _place_entries(
        self,
        traced: popxl.plan.TracedProgram,
        window: int | None = None,
        other_bytes: int | None = None,
        all_host: popxl.plan.AllHostSimulation | None = None,
    ) -> tuple[popxl.plan.Placement, bool]:
        """Choose the remote-buffer entries that stay on the device; returns also if that fits.

        Arguments as for `popxl.plan.place_entries`. A placement changes the other memory that a run
        takes, so it is repeated until that is known.
        """
        for _ in range(_TRIES):
            memory = int(self._memory)
            placement = popxl.plan.place_entries(
                traced, self._rates, memory, other_bytes, all_host, window
            )
            needed = max(other_bytes or 0, placement.timeline.extent - placement.nbytes)
            on_device, on_host = self._fits_device(traced, placement)
            if needed == other_bytes or (
                on_device and (on_host or not self._may_traced_fit_device(traced))
            ):
                break
            other_bytes, all_host = needed, placement.all_host
        return placement, on_device and on_host

    def _program_and_trace(
        self, variant: ProgramVariant
    ) -> tuple[TrainingProgram, popxl.plan.TracedProgram]:
        """Return the program and trace of a variant whose `saved_layers` are by layer type."""
        if not variant.saved_layers:
            return self._variants.get_program(variant)
        phases = self._variants.phases_by_type
        saved = ((p, share) for name, share in variant.saved_layers for p in phases[name])
        return self._variants.get_program(replace(variant, saved_layers=frozenset(saved)))

    def may_fit_device(self, variant: ProgramVariant) -> bool:
        """Return True if the remote-buffer entries of a variant fit device plus host memory."""
        return self._may_traced_fit_device(self._program_and_trace(variant)[1])

    def _may_traced_fit_device(self, traced: popxl.plan.TracedProgram) -> bool:
        available = self._memory + (0 if self._one_memory else self._host)
        return _entry_bytes(traced) <= available

    def _fits_device(
        self, traced: popxl.plan.TracedProgram, placement: popxl.plan.Placement
    ) -> tuple[bool, bool]:
        """Return two truth values: if a placement fits the device's memory, and the host's."""
        stored = traced.permanent_storage()
        on_device = stored.fixed_device_bytes + placement.timeline.extent
        if self._one_memory:
            on_host_fits = stored.remote + on_device <= min(self._memory, self._host)
        else:
            on_host_fits = stored.remote <= self._host
        return on_device <= (1 - popxl.plan.MARGIN) * self._memory, on_host_fits


def may_fit(variants: ProgramVariants, config: RunConfig, target_machine: Machine) -> bool:
    """Return True if the remote-buffer entries of a program fit device plus host memory."""
    search = PlacementSearch.for_machine(target_machine, variants, config)
    return search._may_traced_fit_device(variants.get_program()[1])


def _entry_bytes(traced: popxl.plan.TracedProgram) -> int:
    """Return the bytes of all remote-buffer entries of a program, wherever they are."""
    stored = traced.permanent_storage()
    return stored.remote + stored.resident + stored.disk


def _host_bytes_per_process(config: RunConfig, target_machine: Machine) -> float:
    """Return the host memory in bytes that is available to each replica's process."""
    return target_machine.host_memory / min(
        config.num_replicas, target_machine.devices or config.num_replicas
    )


def build_best_program(config: RunConfig, build: Build, memory: float) -> TrainingProgram:
    """Build and place the fastest training program for the local devices, and print the choice.

    Args:
        memory: bytes of each device.
    """
    desc, instances = resolve_device_desc(config), popdist.getNumInstances()
    kind = hardware.device_kinds(desc, config.num_replicas, instances)[0]
    listed = machine_for_device_kind(kind)
    host = (
        (usable_host_bytes(config) or 2**63)
        * (1 - _SPARE_HOST)
        / (config.num_replicas // instances)
    )
    # All processes have to choose the same program.
    memory, host = (min(popdist.all_gather_object(nbytes)) for nbytes in (memory, host))
    target = "gpu" if listed is None else listed.target
    variants = ProgramVariants(build, default_variant(config), target)
    best = search_placement(variants, config, listed or machine("h100"), memory, host).best
    say(format_placement(best) + ("" if listed else f" ({kind} is unknown: as for an H100)"))
    return best.program


def format_placement(trial: PlacementTrial) -> str:
    """Format the bytes that stay on the device, and the seconds that this should save per step."""
    placement = trial.placement
    resident = ", ".join(
        f"{kind.nbytes / 1e9:.1f} GB of {kind.label}"
        for kind in sorted(placement.kinds, key=lambda kind: -kind.nbytes)
        if kind.nbytes >= 5e7
    )
    before, after = placement.all_host_timeline.seconds, placement.timeline.seconds
    return (
        f"placement: {resident or 'nothing'} in device memory; {trial.title}; a simulated run "
        f"takes {after:.2f} s (everything in host memory: {before:.2f} s)"
    )
