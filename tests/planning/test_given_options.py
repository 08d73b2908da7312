"""What `auto` chooses of ways to save memory that take time, and what they cost where given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from config.sections import RunConfig
from planning.hardware.machines import Machine, machine
from planning.placement_search import PlacementResult, search_placement
from planning.program_variants import VariantCache
from planning.report import make_report
from planning.report_text import format_report
from planning.requirements import finetuning_requirements
from tests.modelling.gptj.hf import small_config

H100 = machine("h100")
PROGRAMS = VariantCache()
"""Traced programs, which the tests share as the plans of one command do."""


def _config(tensor_parallel: int = 2, **execution: Any) -> RunConfig:
    changes = {"activations": "recompute", **execution}
    changed = {f"execution.{name}": value for name, value in changes.items()}
    return small_config(1, tensor_parallel, 1, layers=2).with_values(changed)


def _in_one_pass(config: RunConfig) -> RunConfig:
    return config.with_values({"execution.micro_batches_per_pass": config.gradient_accumulation})


def _chosen(config: RunConfig, on: Machine = H100, **memory: float) -> PlacementResult:
    return search_placement(PROGRAMS.variants(config, on.target), config, on, **memory)


def test_auto_takes_whole_activations_where_they_are_faster() -> None:
    auto, sharded, whole = (
        _chosen(_config(rts_activations=value)).best for value in ("auto", True, False)
    )
    assert auto.variant.changes == (("rts_activations", False),)
    assert "rts_activations false" in auto.title
    assert auto.seconds == whole.seconds < sharded.seconds
    gathers = [
        sum(c.count for part in trial.traced.plan().parts for c in part.collectives)
        for trial in (auto, sharded)
    ]
    assert gathers[0] < gathers[1]
    assert _chosen(_config(1, rts_activations="auto")).best.variant.changes == ()


def test_auto_takes_slices_where_a_step_does_not_fit_otherwise() -> None:
    config = _config(1, attention="scores", micro_batch_size=1, attention_serialisation="auto")
    config = _in_one_pass(config.with_values({"model.sequence_length": 128}))
    needed = {}
    for slices in (1, 2):
        way = config.with_values({"execution.attention_serialisation": slices})
        best = _chosen(way).best
        needed[slices] = (
            best.traced.permanent_storage().fixed_device_bytes
            + best.placement.all_host_timeline.extent
        )
    assert needed[2] < needed[1]
    roomy, tight = _chosen(config).best, _chosen(config, memory=needed[1] - 1).best
    assert (roomy.fits, roomy.variant.changes) == (True, ())
    assert (tight.fits, dict(tight.variant.changes).keys()) == (True, {"attention_serialisation"})
    several = config.with_values({"execution.micro_batches_per_pass": "auto"})
    several = _in_one_pass(several.with_values({"execution.micro_batch_size": 2}))
    assert not _chosen(several, memory=needed[1] - 1).best.variant.changes


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rts_activations": True}, "rts_activations true"),
        ({"rts_activations": True, "attention_serialisation": 2}, "and attention_serialisation 2"),
        ({"rts_activations": "auto"}, ""),
    ],
)
def test_a_plan_says_what_given_values_cost(given: dict[str, Any], named: str) -> None:
    requirements = finetuning_requirements(_config(**given), H100.target, PROGRAMS)
    shown = format_report(make_report("small", requirements, H100))
    costs = [line for line in shown.splitlines() if line.startswith("costs ")]
    assert len(costs) == bool(named)
    assert all(named in line for line in costs)


def test_both_fields_take_auto_and_their_own_values() -> None:
    config = _config()
    assert (config.execution.num_query_chunks, config.execution.shards_activations) == (1, True)
    own = _config(rts_activations=False, attention_serialisation=2).execution
    assert (own.num_query_chunks, own.shards_activations) == (2, False)
    assert replace(own, rts_activations="auto").shards_activations
