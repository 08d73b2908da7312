"""The placement search: it simulates few variants of a program, and chooses as if it did all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planning.hardware.machines import machine
from planning.placement_search import PlacementSearch, search_placement
from planning.program_variants import (
    PlacementTrial,
    ProgramVariant,
    ProgramVariants,
    RematPolicy,
    VariantCache,
)
from tests.planning.presets import preset
from tests.slow import slow

CONFIG = preset(
    "gptj_tiny",
    model={"layers": 8, "hidden_size": 256},
    training={"global_batch_size": 64},
    execution={"micro_batch_size": 8},
)
PASSES = 1, 2, 4, 8
SHARES = 0.0, 0.25, 0.5, 0.75, 1.0
GPU = replace(machine("t4"), platform="gpu", host_memory=1e9, devices=1, host_link=1e8)


@pytest.fixture(scope="module")
def variants() -> ProgramVariants:
    return VariantCache().variants(CONFIG, "gpu")


def state_bytes(variants: ProgramVariants) -> int:
    stored = variants.get_program()[1].permanent_storage()
    return stored.remote + stored.resident


def new_search(variants: ProgramVariants, memory: float) -> PlacementSearch:
    return PlacementSearch.for_machine(replace(GPU, memory=memory), variants, CONFIG)


def saved(share: float) -> RematPolicy:
    return frozenset({("GPTJBlock", share)} if share else ())


@pytest.fixture(scope="module")
def all_variants() -> ProgramVariants:
    return VariantCache().variants(CONFIG, "gpu")


@pytest.mark.parametrize("share", [slow(0.8), slow(1.2), 1.6, slow(3), slow(20)])
def test_the_choice_is_that_of_an_exhaustive_search(
    share: float, variants: ProgramVariants, all_variants: ProgramVariants
) -> None:
    memory = share * state_bytes(variants)
    chosen = search_placement(variants, CONFIG, replace(GPU, memory=memory))
    every = new_search(all_variants, memory)
    fastest: dict[int, PlacementTrial] = {}
    for per_pass, part in itertools.product(PASSES, SHARES):
        trial = every.simulate_variant(ProgramVariant(per_pass, saved(part)))
        fastest[per_pass] = min(fastest.get(per_pass, trial), trial, key=lambda t: t.seconds)
    assert all(trial.fits for trial in every.tried)
    assert all(every.busy_seconds(trial.variant) <= trial.seconds for trial in every.tried)
    least = min(trial.seconds for trial in fastest.values())
    assert len(chosen.tried) < len(PASSES) * len(SHARES) / 2
    assert chosen.best.fits
    gain = 1.01 if chosen.best.variant.per_pass < 8 else 1.05
    assert chosen.best.seconds <= gain * least, "several passes have to gain 5 %"


def test_variants_that_cannot_be_faster_are_not_simulated(
    variants: ProgramVariants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One computes as long as the fastest run takes; one waits as its trial that saves less."""
    search = new_search(variants, 20 * state_bytes(variants))
    best = search.simulate_variant(ProgramVariant(8))
    simulated: list[ProgramVariant] = []

    def simulate(variant: ProgramVariant) -> PlacementTrial:
        simulated.append(variant)
        return replace(best, variant=variant)

    monkeypatch.setattr(search, "simulate_variant", simulate)
    times = {saved(0.25): 0.995, saved(0.5): 0.95, saved(0.75): 0.5, saved(1.0): 0.2}
    candidates = [ProgramVariant(8, policy) for policy in times]

    def with_bounds(waits: float) -> list[ProgramVariant]:
        seconds = {policy: part * best.seconds for policy, part in times.items()}
        seconds[saved(0)] = (1 - waits) * best.seconds
        monkeypatch.setattr(search, "compute_seconds", lambda v: seconds[v.saved_layers])
        monkeypatch.setattr(search, "_estimate_placed", lambda v: search_estimates(v))
        simulated.clear()
        assert search.find_fastest(best, candidates) is best
        return list(simulated)

    def search_estimates(variant: ProgramVariant) -> float:
        search._placed_seconds[variant] = best.seconds * (0 if variant.saved_layers else 1)
        return search._placed_seconds[variant]

    assert with_bounds(waits=0.0) == [ProgramVariant(8, saved(p)) for p in (1.0, 0.75, 0.5)]
    assert with_bounds(waits=0.6) == [ProgramVariant(8, saved(1.0))]
    search.limit_seconds(0.1 * best.seconds)
    assert not with_bounds(waits=0.0)
