"""Bounds by which the placement search leaves variants out: estimates beside simulated runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning import placement_search as module
from planning.hardware.machines import machine
from planning.placement_search import PlacementSearch
from planning.program_variants import PlacementTrial, VariantCache
from tests.planning.presets import preset


def simulate_all(search: PlacementSearch, per_pass: int) -> list[PlacementTrial]:
    """The trials that fit, the one that recomputes all activations first."""
    search.find_best_remat(per_pass)
    return [t for t in search.tried if t.fits and t.variant.per_pass == per_pass]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine_name"),
    [
        ("gptj_6B_gpu", "h100"), ("gptj_6B_gpu_fp8", "h200"), ("llama3_1_8B", "h100"),
        ("xl_gpu", "h100"), ("xl_gpu", "rtx4090"), ("qwen3_0_6B", "l40s"),
    ],
)  # fmt: skip
def test_estimates_leave_out_no_variant_that_would_be_faster(
    name: str, machine_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that simulates all variants: of those faster than recomputing, both bounds hold."""
    monkeypatch.setattr(PlacementSearch, "_can_be_faster_than", lambda *_: True)
    config, on = preset(name), replace(machine(machine_name), devices=1)
    search = PlacementSearch.for_machine(on, VariantCache().variants(config, on.target), config)
    compared = 0
    for per_pass in {1, config.gradient_accumulation}:
        first, *others = simulate_all(search, per_pass)
        assert not first.variant.saved_layers
        for trial in others:
            ratios = [search._estimate_placed(t.variant) / t.seconds for t in (first, trial)]
            print(f"{name} on {machine_name}: {ratios[1]:.3f} ({ratios[0]:.3f}) {trial.title}")
            if trial.seconds < first.seconds:
                compared += 1
                assert ratios[1] <= module._OVERESTIMATE
                assert ratios[1] / ratios[0] <= module._SPREAD
    assert compared, "there is none"
