"""How devices share training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from config.sections import RunConfig
from planning import parallel_layouts as module
from planning.auto_config import resolve_auto_fields
from planning.batch_size_advice import with_batch_advice
from planning.config_loader import CONFIG_LOADER
from planning.fit_search import plan_best_training, search_fitting_config
from planning.hardware.machines import Machine, machine
from planning.parallel_layouts import list_layouts, select_promising_layouts
from planning.program_variants import VariantCache
from planning.report import LargerBatchAdvice
from planning.report_text import format_report
from terminal.command_line import read_command_line
from tests.planning.presets import preset
from tests.slow import slow

FOUR = replace(machine("t4"), memory=1e9, host_memory=1e9, devices=4)
PROGRAMS = VariantCache()
"""Traced programs, which the tests share as the plans of one command do."""


def small(batch: int = 8) -> RunConfig:
    return preset(
        "gptj_tiny",
        model={"layers": 1, "attention": {"heads": 4, "rotary_dim": 2}},
        training={"global_batch_size": batch},
        execution={"micro_batch_size": 1, "activations": "recompute"},
    )


def ways(config: RunConfig, devices: int, micro: int | None = 1) -> list[tuple[int, int, int]]:
    """Copies, devices of each, and samples of a micro-batch."""
    made = [each.execution for each in list_layouts(config, devices, micro)]
    return [(e.data_parallel, e.tensor_parallel, e.micro_batch_size) for e in made]


def test_all_ways_in_which_devices_can_share_a_batch_and_layers() -> None:
    assert ways(small(), 4) == [(4, 1, 1), (2, 2, 2), (1, 4, 4)]
    assert ways(small(), 8) == [(8, 1, 1), (4, 2, 2), (2, 4, 4)], "there are four heads"
    assert ways(small(2), 4) == [(2, 2, 1), (1, 4, 2)], "two samples"
    assert ways(small(), 4, micro=4) == [(4, 1, 2), (2, 2, 4), (1, 4, 8)]
    assert ways(small(), 1) == [(1, 1, 1)]


def test_a_given_micro_batch_stays() -> None:
    config = small().with_values({"execution.micro_batch_size": 4})
    assert ways(config, 4, None) == [(2, 2, 4), (1, 4, 4)]


def test_fewer_devices_where_not_all_can_share() -> None:
    assert ways(small(), 7) == ways(small(), 4), "7, 6 and 5 share neither 8 samples nor 4 heads"


@pytest.mark.parametrize(("batch", "best"), [slow(8, (4, 1)), (2, (1, 4))])
def test_no_layout_is_faster_than_the_chosen_one(batch: int, best: tuple[int, int]) -> None:
    all_ways = list_layouts(small(batch), 4, 1)
    made = plan_best_training("small", all_ways, FOUR, PROGRAMS)
    times = [
        search_fitting_config("small", way, FOUR, PROGRAMS).expected_seconds for way in all_ways
    ]
    assert made.expected_seconds == min(times)
    e = made.requirements.config.execution
    assert (e.data_parallel, e.tensor_parallel) == best


def test_a_layout_whose_bound_is_too_long_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = list[int]()

    def seen(
        layout: module.ParallelLayout, on: Machine, programs: VariantCache
    ) -> module.ParallelLayout:
        simulated.append(layout.config.execution.tensor_parallel)
        return layout

    monkeypatch.setattr(module, "_simulate_layout", seen)
    slow_links = replace(FOUR, link=1e5)
    assert select_promising_layouts(list_layouts(small(), 4, 1), slow_links, PROGRAMS)
    assert simulated == [4, 2], "four copies exchange twice as much"


def test_a_batch_that_feeds_the_devices_is_named() -> None:
    """Exchanging the gradients takes as long for one sample as for many."""
    on = replace(FOUR, link=1e8)
    few = plan_best_training("small", list_layouts(small(4), 4, 1), on, PROGRAMS)
    told = with_batch_advice(few, PROGRAMS).larger_batch
    assert told is not None
    enough = plan_best_training("small", list_layouts(small(told.samples), 4, 512), on, PROGRAMS)
    rates = [n / made.expected_seconds for n, made in ((4, few), (told.samples, enough))]
    assert told.gain == pytest.approx(rates[1] / rates[0], 0.01)
    assert told.gain > 1.25


def test_a_batch_that_is_large_enough_stays() -> None:
    one = plan_best_training("small", [small(4)], FOUR, PROGRAMS)
    assert with_batch_advice(one, PROGRAMS).larger_batch is None, "of one device"
    slow = replace(FOUR, flops=dict.fromkeys(FOUR.flops, 1e9))
    many = plan_best_training("small", list_layouts(small(64), 2, 16)[:1], slow, PROGRAMS)
    assert with_batch_advice(many, PROGRAMS, has_explicit_layout=True).larger_batch is None


# ---- the command line ---------------------------------------------------------------------------
def layout(*flags: str, count: int | None = None) -> tuple[int, int, int]:
    """Of a preset, on a machine of four devices: copies, devices of each, micro-batch."""
    model = ("--config", "gptj_tiny", "--layers", "1", "--global_batch_size", "8")
    flags = (*model, "--micro_batch_size", "2", "--activations", "recompute", *flags)
    line = read_command_line("", "finetuning", "tiny", flags, loader=CONFIG_LOADER)
    e = resolve_auto_fields(
        line, ("train",), trains=True, machine=FOUR, count=count, programs=PROGRAMS
    ).config.execution
    return e.data_parallel, e.tensor_parallel, e.micro_batch_size


def test_a_preset_uses_all_devices_of_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout() == (4, 1, 2)
    said = capsys.readouterr().err
    assert said.startswith("devices: 4 = 4 dp × 1 tp, micro-batches of 2 (--data_parallel and")


def test_the_number_of_devices_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout(count=2) == (2, 1, 2)
    assert layout(count=3) == (2, 1, 2)
    assert "devices: 2 = 2 dp × 1 tp of 3, which cannot share it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--data_parallel", "2"), (2, 1, 2)),
        (("--tensor_parallel", "2"), (1, 2, 2)),
        (("--data_parallel", "1"), (1, 1, 2)),
    ],
)
def test_what_is_told_is_done(
    flags: tuple[str, str], told: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert layout(*flags) == told
    assert not capsys.readouterr().err


def test_processors_share_the_batch() -> None:
    """There is nothing to simulate."""
    line = read_command_line("", "finetuning", "tiny", ("--config", "tiny"), loader=CONFIG_LOADER)
    made = resolve_auto_fields(
        line, ("train",), trains=True, machine=machine("laptop"), count=4
    ).config
    assert (made.execution.data_parallel, made.execution.micro_batch_size) == (4, 16)


def test_a_plan_names_a_larger_batch() -> None:
    made = plan_best_training("small", [small(4)], FOUR, PROGRAMS)
    assert "small batch" not in format_report(made)
    few = replace(made, larger_batch=LargerBatchAdvice(64, 2.5))
    line = "4 samples a step are few for 1 devices: with --global_batch_size 64 about 2.5 times"
    assert line in format_report(few)
    assert few.as_dict()["larger_batch"] == {"samples": 64, "gain": 2.5}
