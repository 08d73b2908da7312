"""What fits where, and what the command says of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import docs.large_models as large
import popxl
from config.sections import RunConfig
from planning import fit, placement_search
from planning.fit_search import plan_best_training, plan_generation
from planning.hardware.local_machine import measure_local_machine
from planning.hardware.machines import Machine, machine
from planning.program_variants import ProgramVariant, VariantCache
from planning.requirements import finetuning_requirements
from popxl.plan import place_entries
from tests.planning.presets import preset

GB = 1e9
ONE = replace(machine("t4"), memory=1 * GB, host_memory=1 * GB, devices=2)


AGAIN = {"activations": "recompute"}
"""Leaves one program to simulate for a micro-batch."""


def tiny(name: str = "tiny", **execution: object) -> RunConfig:
    return preset(
        name,
        model={"layers": 1},
        training={"global_batch_size": 16},
        execution={"micro_batch_size": 16} | execution,
    )


def found(on: Machine, programs: VariantCache) -> tuple[object, ...]:
    made = plan_best_training("tiny", [tiny("gptj_tiny", **AGAIN)], on, programs)
    e = made.requirements.config.execution
    return made.fits, e.micro_batch_size, e.disk is not None, made.plan.disk > 0


def test_a_smaller_micro_batch_where_device_memory_is_small() -> None:
    programs = VariantCache()
    assert found(ONE, programs) == (True, 16, False, False)
    fits, micro, *disk = found(replace(ONE, memory=12e6), programs)
    assert fits
    assert isinstance(micro, int)
    assert 1 <= micro < 16
    assert disk == [False, False]
    two = tiny("gptj_tiny", micro_batch_size=2, **AGAIN)
    two = two.with_values({"training.global_batch_size": 2})
    none = plan_best_training("tiny", [two], replace(ONE, memory=1e6))
    assert (none.fits, none.requirements.config.execution.micro_batch_size) == (False, 1)


def test_a_program_is_built_and_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried for the size of the micro-batch serves the plan; so it does with a disk. What
    device and host together cannot hold is not placed."""
    config, programs, on, placed = tiny("gptj_tiny"), VariantCache(), machine("t4"), []
    monkeypatch.setattr(
        popxl.plan, "place_entries", lambda *given: placed.append(given) or place_entries(*given)
    )
    variants = programs.variants(config, on.target)
    chosen = placement_search.search_placement(variants, config, on)
    assert chosen.best.fits
    count = len(placed)
    assert count >= len(chosen.tried) > 1
    made = plan_best_training("gptj_tiny", [config], on, programs)
    assert made.requirements.variants is variants
    assert made.requirements.placement is chosen.best.placement
    assert len(placed) == count
    stored = variants.get_program()[1].permanent_storage()
    least = stored.remote + stored.resident
    small = replace(on, memory=0.6 * least, host_memory=0.3 * least)
    assert not placement_search.search_placement(variants, config, small).best.fits
    count = len(placed)
    with_disk = config.with_values({"execution.disk": "somewhere"})
    assert len(placement_search.search_placement(variants, with_disk, small).tried) == 1
    assert len(placed) == count


def test_the_disk_where_host_memory_is_small() -> None:
    """Its windows take 0.8 GB of host memory, and Python and JAX as much."""
    laptop = replace(machine("laptop"), host_memory=1.45 * GB)
    # Entries of the tiny model are below what is worth a request.
    made = plan_best_training("tiny", [tiny("gptj_tiny")], laptop)
    assert made.fits
    assert made.timeline is None
    large_one = preset(
        "gptj_tiny",
        model={"layers": 1, "hidden_size": 512},
        training={"global_batch_size": 1},
        execution={"micro_batch_size": 1},
    )
    programs, small = VariantCache(), replace(machine("laptop"), host_memory=8 * GB)
    without = plan_best_training("larger", [large_one], small, programs)
    small = replace(small, host_memory=without.memory_use["memory"][0] - 1)
    made = plan_best_training("larger", [large_one], small, programs)
    assert made.requirements.config.execution.disk is not None
    assert made.plan.disk > 0
    assert made.timeline is not None
    assert made.seconds < made.expected_seconds or made.fits is False


def test_generation_is_planned_layer_by_layer_where_weights_do_not_fit() -> None:
    resident = plan_generation("tiny", tiny(), ONE)
    assert not resident.requirements.streamed
    device = resident.memory_use["device memory"][0]
    streamed = plan_generation("tiny", tiny(), replace(ONE, memory=device - 1))
    assert streamed.requirements.streamed
    assert streamed.fits
    # What decides whether a position is written at all is not known to plans.
    assert streamed.requirements.flops_per_sample == pytest.approx(
        resident.requirements.flops_per_sample, 0.1
    )
    assert streamed.requirements.tokens == streamed.requirements.samples * 4


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    on = ["--machine", "t4", "--execution.activations", "recompute", "--data_parallel", "1"]
    assert fit.main(["gptj_tiny", "--layers", "1", "--tokens", "1e6", *on]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["fits"] == "yes"
    assert lines["training"].startswith("1,000,000 tokens take ")
    assert lines["generation"].startswith("on one device, weights on the device")
    two = ("--global_batch_size", "2", "--micro_batch_size", "2")
    sizes = {"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert fit.main([str(tmp_path / "config.json"), *two, *on]) == 0
    assert "2.0 M parameters" not in capsys.readouterr().out
    (tmp_path / "other.json").write_text("{}")
    for wrong in (str(tmp_path / "other.json"), "nobody/nothing"):
        assert fit.main([wrong, "--machine", "t4"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert len(said) < 300
    assert fit.main([]) == 2
    assert "name a model" in capsys.readouterr().err


def test_published_models_are_their_presets() -> None:
    named = {preset for preset, _ in large.MODELS.values()}
    assert {fit._preset_for("google/flan-t5-xl"), fit._preset_for("Qwen/Qwen3-32B")} <= named
    assert fit._preset_for("google/flan-t5-tiny") is None


def test_the_machine_at_hand_is_measured(tmp_path: Path) -> None:
    here = measure_local_machine(tiny(device="cpu"), str(tmp_path))
    assert 1e9 < here.flops["float32"] < 1e14
    assert here.achieved_rates("float32", 1).flops == here.flops["float32"], "it is measured"
    assert 1e6 < here.disk_write < 1e12
    assert here.disk > 0
    assert not list(tmp_path.iterdir())


# ---- the document -------------------------------------------------------------------------------
def test_the_tables_of_large_models_are_those_of_its_numbers() -> None:
    text = large.DOCUMENT.read_text(encoding="utf-8")
    assert large.rewrite_tables(text, large.read_rows()) == text, (
        "python3 -m docs.large_models --tables"
    )


def test_the_numbers_of_one_model_are_computed_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[list[large.PlannedModelRow]] = []
    monkeypatch.setattr(large, "compute_missing_rows", kept.append)
    monkeypatch.setattr(large, "DOCUMENT", tmp_path / "large_models.md")
    large.DOCUMENT.write_text("", encoding="utf-8")
    for arguments in (["GPT-J 6B"], ["--missing"], []):
        large.main(arguments)
    of_others = [row for row in large.read_rows() if row.model != "GPT-J 6B"]
    assert kept == [of_others, large.read_rows(), []]
    with pytest.raises(SystemExit):
        large.main(["GPT-K"])
    assert "there is no GPT-K: choose of FLAN-T5 XL, " in capsys.readouterr().err


@pytest.mark.slow
def test_entries_are_placed_until_they_fit() -> None:
    """The less travels to the device, the more of it waits there: two placements are too large."""
    assert large.plan_model("Llama 3.1 8B", "l40s", 1).fits


@pytest.mark.slow
@pytest.mark.parametrize("model", large.MODELS)
def test_the_numbers_of_large_models_are_what_is_simulated(model: str) -> None:
    rows = {(row.model, row.machine): row for row in large.read_rows()}
    for row in large.compute_rows(model, list(large.MACHINES)):
        assert row == rows[model, row.machine], "run: python3 -m docs.large_models"


def test_a_long_text_of_a_large_vocabulary_plans_with_little_memory() -> None:
    """Its logits take 67 GB in float32, and their gradient as much."""
    config = preset(
        "llama3_1_8B",
        model={"num_hidden_layers": 1, "sequence_length": 2**17},
        training={"global_batch_size": 1},
        execution={"micro_batch_size": 1},
    )
    plan = finetuning_requirements(config, "gpu 9.0").plan
    logits = 4 * 2**17 * config.model.vocab_size
    of_scores = 2 * 2**34  # the gradient of one head's, in 16 bits, which cuDNN's kernel writes
    assert of_scores < plan.temporaries < of_scores + 0.5 * logits
    assert {part.name for part in plan.parts} >= {"head/backward"}


def test_micro_batches_pass_alone_where_that_is_clearly_faster() -> None:
    """With room for the state and the activations of a pass, but not for those of a step."""
    config = preset(
        "gptj_tiny",
        model={"layers": 8, "hidden_size": 256},
        training={"global_batch_size": 64},
        execution={"micro_batch_size": 8},
    )
    programs, gpu = VariantCache(), replace(ONE, platform="gpu", host_link=1e8)
    variants = programs.variants(config, "gpu")

    def chosen(memory: float) -> placement_search.PlacementTrial:
        return placement_search.search_placement(variants, config, replace(gpu, memory=memory)).best

    state = variants.get_program()[1].permanent_storage().remote
    alone, all_at_once = chosen(1.6 * state), chosen(20 * state)
    assert alone.variant.per_pass < 8
    assert alone.is_bound_by_compute
    assert all_at_once.variant.per_pass == 8, "several passes have to gain something"
    one_pass = config.with_values({"execution.micro_batches_per_pass": 8})
    given = placement_search.search_placement(
        variants, one_pass, replace(gpu, memory=1.6 * state)
    ).best
    assert alone.seconds < 0.95 * given.seconds


def test_inputs_of_products_are_saved_where_they_fit() -> None:
    config = preset(
        "qwen3_tiny",
        model={"hidden_size": 256, "intermediate_size": 1024},
        training={"global_batch_size": 16},
        execution={"micro_batch_size": 4},
    )
    variants = VariantCache().variants(config, "gpu")
    state = variants.get_program()[1].permanent_storage().remote
    for share, saves_matmul_inputs in ((2, True), (1.2, False)):
        gpu = replace(ONE, platform="gpu", host_link=1e10, bandwidth=1e10, memory=share * state)
        best = placement_search.search_placement(variants, config, gpu).best
        assert best.variant.saves_matmul_inputs == saves_matmul_inputs
        assert best.fits
        assert best.variant.saved_layers == frozenset({("LlamaBlock", 1.0)})


def test_what_a_first_placement_leaves_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less on its way to the device there is room for more entries."""
    placed = []
    monkeypatch.setattr(
        popxl.plan, "place_entries", lambda *given: placed.append(given) or place_entries(*given)
    )
    config = preset(
        "gptj_tiny",
        model={"layers": 8, "hidden_size": 256},
        training={"global_batch_size": 64},
        execution={"micro_batch_size": 8},
    )
    gpu = replace(ONE, platform="gpu", host_link=1e8)
    variants = VariantCache().variants(config, "gpu")
    buffers = variants.get_program()[1].ir.remote_buffers
    memory = 0.8 * variants.get_program()[1].permanent_storage().remote
    search = placement_search.PlacementSearch.for_machine(
        replace(gpu, memory=memory), variants, config
    )
    first = search.simulate_variant(ProgramVariant(8))
    count = len(placed)
    best = search.fill_device_memory(first)
    assert len(placed) > count
    count = len(placed)
    assert best.fits
    assert best.seconds < first.seconds
    assert best.placement.nbytes > first.placement.nbytes
    resident = sum(len(b.resident_entries) * _nbytes(b) for b in buffers)
    assert resident == best.placement.nbytes, "the one that was faster is set"
    assert search.tried == [best]
    assert search.fill_device_memory(best) is best
    assert len(placed) == count


def _nbytes(buffer: popxl.RemoteBuffer) -> int:
    return math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize
