"""Reports of plans: estimates of time, text, JSON, picture, and the hardware table."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import image

import finetuning
import inference
import popxl
import run_finetuning
import run_validation
from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from docs import plans
from modelling.layers import lm_head_loss
from planning import placement_search
from planning.hardware.machines import TABLE, Machine, machine, machine_for_device_kind, machines
from planning.program_variants import ProgramVariant, VariantCache
from planning.report import make_report
from planning.report_text import format_report
from planning.requirements import Requirements, finetuning_requirements, plan_on_machine
from planning.roofline import resource_times
from popxl.plan import Collective, Kernel, RegionCost
from tests.planning.presets import preset


@cache
def gptj_6b(target: str = "cpu", batch: int = 128, **execution: Any) -> Requirements:
    name, kind = "gptj_6B_gpu", "finetuning"
    config_class = config_class_of_preset(load_preset(kind, name), name)
    changes = {"execution": execution, "training": {"global_batch_size": batch}}
    config = load_config(config_class, kind, name, changes)
    return finetuning_requirements(config, target)


GB = 1e9
ONE = Machine(
    name="one",
    title="a machine to reckon with",
    flops={"float32": 1e12},
    memory=8 * GB,
    bandwidth=100 * GB,
    host_link=10 * GB,
    link=50 * GB,
    devices=4,
    host_memory=64 * GB,
    network=5 * GB,
)


def test_the_slowest_resource_decides() -> None:
    part = RegionCost(
        "layer/forward",
        flops=3 * 10**12,
        device_traffic=int(200 * GB),
        host_to_device=int(40 * GB),
        device_to_host=int(50 * GB),
        collectives=(Collective("all_gather", 4, True, 2, int(80 * GB)),),
    )
    found = resource_times(part, ONE.rates("float32", 8))
    # A ring of 4 sends 3 of 4 shards; its neighbours share a host.
    assert vars(found) == {
        "compute": 3.0,
        "memory": 2.0,
        "host": 5.0,
        "network": 60 / 50,
        "disk": 0.0,
    }
    assert (found.seconds, found.bottleneck) == (5.0, "host")


def test_devices_of_a_host_share_its_disk_which_does_one_thing_at_a_time() -> None:
    part = RegionCost("", disk_read=int(6 * GB), disk_written=int(3 * GB))
    one = replace(ONE, disk_read=3 * GB, disk_write=1.5 * GB)
    assert resource_times(part, one.rates("float32", 1)).disk == 2 + 2
    assert resource_times(part, one.rates("float32", 8)).disk == 4 * (2 + 2)
    assert resource_times(part, replace(one, devices=None).rates("float32", 2)).disk == 2 * (2 + 2)


def test_products_in_fp8_have_a_rate_of_their_own_where_there_is_one() -> None:
    part = RegionCost("", flops=10 * 10**12, float8_flops=8 * 10**12)
    bfloat16, float8 = (machine("h100").flops[t] / 1e12 for t in ("bfloat16", "float8"))
    assert (
        resource_times(part, machine("h100").rates("bfloat16", 1)).compute
        == 2 / bfloat16 + 8 / float8
    )
    assert resource_times(part, machine("a100").rates("bfloat16", 1)).compute == 10 / 312


@pytest.mark.parametrize(
    ("group", "consecutive", "rate"), [(4, True, 50), (8, True, 5), (2, False, 5)]
)
def test_groups_that_leave_a_host_use_the_network(
    group: int, consecutive: bool, rate: float
) -> None:
    nbytes = 64 * 10**9
    part = RegionCost("", collectives=(Collective("all_reduce", group, consecutive, 1, nbytes),))
    sent = 2 * nbytes * (group - 1) / group
    assert resource_times(part, ONE.rates("float32", 8)).network == pytest.approx(
        sent / (rate * GB)
    )


def test_virtual_devices_divide_the_machine() -> None:
    whole, part = (machine("laptop").rates("float32", n) for n in (1, 4))
    assert part.flops * 4 == whole.flops
    assert part.bandwidth * 4 == whole.bandwidth
    assert machine("h100").rates("float32", 4).flops == machine("h100").flops["float32"]


def test_simulated_runs_take_what_programs_reach() -> None:
    """Bounds take the data sheet's rates."""
    h100, h200 = machine("h100"), machine("h200").achieved_rates("bfloat16", 1)
    achieved = h100.achieved_rates("bfloat16", 1)
    assert (achieved.flops, achieved.float8_flops) == (742e12, 1435e12)
    assert (achieved.host_link, achieved.both_ways) == (52e9, 41e9)
    assert achieved.bandwidth == pytest.approx(0.88 * 3.35e12)
    assert h100.rates("bfloat16", 1).flops == 989e12
    forward, backward = Kernel(0, 10**12, attention=64), Kernel(0, 10**12, False, 80, True)
    assert h200.kernel_seconds({forward: 1}) == pytest.approx(1 / 195 + 2e-6)
    assert h200.kernel_seconds({backward: 2}) == pytest.approx(2 * (1 / 188 + 2e-6)), (
        "as of 128 features"
    )
    usual = machine("t4").achieved_rates("float16", 1)
    assert usual.flops == 0.75 * 65e12
    assert usual.kernel_seconds({forward: 1}) == pytest.approx(1 / 32.5 + 2e-6)


def test_the_hardware_table_is_complete() -> None:
    sizes = {name: found.memory / 1e9 for name, found in machines().items()}
    assert sizes == {
        "h100": 80, "h200": 141, "b200": 180, "gh200": 96, "dgx_spark": 128, "gb200": 186,
        "a100": 80, "a800": 80, "l40s": 48, "rtx4090": 24, "t4": 16, "tpu_v5e": 16, "tpu_v2": 8,
        "laptop": 16, "laptop_64": 64,
    }  # fmt: skip
    for found in machines().values():
        assert set(found.flops) - {"float8"} == {"float32", "bfloat16", "float16"}
        found.check()
        data, achieved = (rates("bfloat16", 1) for rates in (found.rates, found.achieved_rates))
        for name in ("flops", "float8_flops", "bandwidth", "host_link", "link", "network"):
            assert 0.5 < getattr(achieved, name) / getattr(data, name) < 1, (found.name, name)


# ---- command lines ------------------------------------------------------------------------------
SMALL = ("--layers", "1", "--execution.activations", "recompute", "--data_parallel", "1")
"""One program to simulate, on one device if nothing else is said."""


def test_the_plan_names_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert finetuning.main(["--config", "tiny", "--plan"]) == 0
    text = capsys.readouterr().out
    rows = {tuple(line.split()[:2]) for line in text.splitlines()}
    phases = ("embeddings", "first_encoder_layer", "encoder_block", "encoder_head",
              "decoder_embeddings", "first_decoder_layer", "decoder_block", "head")  # fmt: skip
    for phase in phases:
        assert (phase, "backward") in rows
        assert (phase, "update") in rows or phase == "decoder_embeddings"  # owns nothing
    assert "0.9 M parameters in float32" in text
    assert "batch        64 = 64 micro × 1 accumulation × 1 dp" in text
    assert "devices      1 = 1 dp × 1 tp, on a laptop, 2 CPU cores\n" in text
    found = re.search(r"state +(\S+) MB.*\nbuffers +(\S+) MB: the state and (\S+) MB", text)
    assert found
    state, buffers, others = map(float, found.groups())
    assert state + others == pytest.approx(buffers, abs=0.2)
    for row in ("inputs", "the rest"):
        assert re.search(f"^{row}: .", text, re.MULTILINE), f"{row} is not explained"


def test_the_plan_places_what_saves_time_in_spare_device_memory() -> None:
    """GPT-J 6B's state fits an H200, but not with all its activations."""
    machine_of = machine("h200")
    # A smaller batch than the preset's hides fewer transfers.
    one_pass = {"activations": "recompute", "micro_batches_per_pass": 8}
    requirements = gptj_6b(machine_of.target, batch=64, **one_pass)
    made = make_report("gptj_6B_gpu", requirements, machine_of)
    placement = made.requirements.placement
    assert placement is not None
    kept = {kind.label: kind.entries / kind.total for kind in placement.kinds if kind.nbytes > 1e9}
    assert kept["weights"] > 0.99
    assert min(kept.values()) < 1
    assert placement.timeline.exposed_transfers < 0.01 * placement.timeline.seconds
    assert placement.timeline.seconds < 0.98 * placement.all_host_timeline.seconds
    assert made.device_bytes < 0.95 * machine_of.usable_bytes
    assert made.plan.resident == placement.nbytes
    assert re.search(
        r"^placement    \d+... GB of the buffers on each", format_report(made), re.MULTILINE
    )
    by_hand = make_report("gptj_6B_gpu", gptj_6b(resident_layers=28), machine_of)
    assert by_hand.requirements.placement is None
    assert "of activations and inputs" in format_report(by_hand)
    assert "-" not in next(
        x for x in format_report(by_hand).splitlines() if x.startswith("buffers")
    )


def test_loads_run_as_far_ahead_as_hides_them_and_no_farther(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In several passes state moves once: the memory serves entries that stay."""
    monkeypatch.setattr(placement_search, "_LEAST", 2**10)
    fields = {"micro_batch_size": 8, "micro_batches_per_pass": 1, "activations": "recompute"}
    config = preset(
        "gptj_tiny", model={"layers": 8}, training={"global_batch_size": 64}, execution=fields
    )
    on = replace(ONE, platform="gpu", memory=0.02 * GB, host_link=2e9)
    best = plan_on_machine(finetuning_requirements(config, "gpu"), on).placement_result
    assert best is not None
    traced, placement = best.best.traced, best.best.placement
    after, rates = placement.timeline, on.achieved_rates("float32", 1)
    assert traced.ir.load_window == after.window <= traced.default_prefetch_window // 2
    assert after.loads
    assert (
        placement.with_window(traced.default_prefetch_window, rates).timeline.extent > after.extent
    )
    default = popxl.plan.place_entries(traced, rates, int(on.usable_bytes))
    assert default.nbytes < placement.nbytes
    assert default.timeline.seconds > after.seconds
    placement.apply()
    assert traced.timeline(rates).seconds == after.seconds


def test_layers_keep_their_activations_where_that_is_faster() -> None:
    """With room for all of them, and not where they would cross a slow link or fit nowhere."""
    programs = VariantCache()

    def plan(on: Machine, **execution: Any) -> tuple[str, float]:
        one_pass = {"micro_batch_size": 8, "micro_batches_per_pass": 8}
        fields = {"global_batch_size": 64}, {**one_pass, **execution}
        config = preset("gptj_tiny", model={"layers": 8}, training=fields[0], execution=fields[1])
        made = make_report("gptj_tiny", finetuning_requirements(config, "gpu", programs), on)
        assert made.timeline is not None
        line = next((x for x in format_report(made).splitlines() if x.startswith("passes")), "")
        assert next(trial["fits"] for trial in made.as_dict()["activations"])
        return line, made.timeline.seconds

    large = replace(ONE, platform="gpu")
    slow = replace(large, memory=0.03 * GB, host_link=1e7)
    short = replace(large, memory=0.05 * GB, host_memory=0.05 * GB)
    line, seconds = plan(large)
    found = re.fullmatch(
        r"passes       8 micro-batches per pass, activations saved by GPTJBlock with inputs of "
        r"matmuls: ([\d.]+) s; 8 micro-batches per pass, recomputed: ([\d.]+) s.*",
        line,
    )
    assert found is not None
    assert float(found[1]) < 0.9 * float(found[2])
    assert plan(large, activations="keep") == ("", pytest.approx(seconds, rel=0.01))
    assert plan(large, activations="recompute")[1] > seconds
    assert plan(slow)[0].startswith("passes       8 micro-batches per pass, recomputed")
    assert "(does not fit)" in plan(short)[0]
    some = replace(large, memory=0.12 * GB, host_link=1e8)
    half = "passes       8 micro-batches per pass, activations saved by 50% of GPTJBlock"
    assert plan(some)[0].startswith(half)


def test_only_layers_that_keep_have_buffers_for_it() -> None:
    config = preset("gptj_tiny", model={"layers": 8})
    variants = finetuning_requirements(config, "gpu").variants
    assert variants is not None

    def inside(share: float) -> int:
        program, _ = variants.get_program(ProgramVariant(1, frozenset({("layer", share)})))
        return sum(
            buffer.entries * math.prod(buffer.tensor_shape)
            for buffer in program.ir.remote_buffers
            if buffer.kind == "activations inside layers"
        )

    assert inside(0.25) == inside(1.0) / 4 > 0


def test_what_the_host_has_no_room_for_stays_on_the_device() -> None:
    config = gptj_6b(micro_batch_size=32, activations="recompute")
    margins = []
    for host in (40e9, 2e12):
        on = replace(machine("h200"), host_memory=host, devices=1)
        made = make_report("gptj_6B_gpu", config, on)
        assert made.plan.host_bytes < host
        assert made.fits
        margins.append(1 - made.device_bytes / on.usable_bytes)
    without_room, with_room = margins
    assert with_room >= 0.05
    assert 0.05 <= without_room < with_room + 0.03, "about as much as where the host has room"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v2", "tpu_v2"),
        ("NVIDIA GeForce GT 430", None),
        ("cpu", None),
    ],
)
def test_the_running_device_is_recognised(kind: str, name: str | None) -> None:
    found = machine_for_device_kind(kind)
    assert (found.name if found else None) == name


OWN = """
flops: {float32: 1.0e+13, float16: 5.0e+13, bfloat16: 5.0e+13}
memory: 12.0e+9
bandwidth: 400.0e+9
host_link: 12.0e+9
link: 12.0e+9
devices: 1
host_memory: 32.0e+9
network: 1.0e+9
"""


def test_a_file_describes_ones_own_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(OWN)
    arguments = ["--config", "gptj_tiny", *SMALL, "--plan", "--machine", str(path)]
    assert finetuning.main(arguments) == 0
    text = capsys.readouterr().out
    assert "on 1 host of 1 (mine)" in text
    assert "simulated" in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory: 12.0e+9\n", "", "lacks memory"),
        ("memory: 12.0e+9\n", "memory: many\n", "memory must be a number above 0, not 'many'"),
        ("devices: 1", "devices: 1\ncapability: new", "capability must be a number such as 9.0"),
        ("link: 12.0e+9\nd", "lnk: 12.0e+9\nd", "has no field 'lnk'"),
        ("float16: 5.0e+13, ", "", "flops must have the rates"),
        ("devices: 1", "devices: -1", "devices must be a whole number above 0"),
        ("devices: 1", "devices: 1\none_memory: true", "one_memory is of one device, whose"),
        ("devices: 1", "devices: 1\nachieved: 1", "achieved must have rates by these names: bandw"),
        ("devices: 1", "devices: 1\nachieved: {flop: 1}", "achieved must have rates by these"),
        ("devices: 1", "devices: 1\nachieved: {link: 0}", "achieved.link must be a number above 0"),
        ("devices: 1", "devices: 1\nattention: {64: 1}", "attention must have two rates"),
        (OWN, "[", "is not a YAML file"),
        (OWN, "3", "must have the fields of a machine"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused_in_a_sentence(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(OWN.replace(old, new))
    with pytest.raises(UserError, match=words) as found:
        machine(str(path))
    assert len(str(found.value)) < 300 + len(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        machine(str(tmp_path / "none.yml"))


def test_what_host_and_device_take_of_one_memory_is_added_up(tmp_path: Path) -> None:
    """Of two memories of the same size, each holds a part."""
    data, path = yaml.safe_load(TABLE.read_text())["dgx_spark"], tmp_path / "two.yml"
    path.write_text(yaml.safe_dump({n: v for n, v in data.items() if n != "one_memory"}))
    config = preset("gptj_tiny", execution={"placement": "host"})
    one, two = (make_report("", finetuning_requirements(config, m.target), m)
                for m in (machine("dgx_spark"), machine(str(path))))  # fmt: skip
    assert list(one.memory_use) == ["memory"]
    (needed, available), parts = one.memory_use["memory"], two.memory_use
    assert list(parts) == ["device memory", "host memory"]
    assert needed == sum(part for part, _ in parts.values())
    assert min(part for part, _ in parts.values()) > 0
    assert available <= machine("dgx_spark").memory
    small = replace(machine("dgx_spark"), memory=0.9 * needed, host_memory=0.9 * needed)
    requirements = finetuning_requirements(config, small.target)
    assert not make_report("", requirements, small).fits
    for factor in (1.0, 1.1, 1.3):
        size = factor * needed
        target = replace(machine("dgx_spark"), memory=size, host_memory=size)
        report = make_report(
            "", finetuning_requirements(preset("gptj_tiny"), target.target), target
        )
        assert report.requirements.placement_result is not None
        assert report.requirements.placement_result.best.fits == report.fits, factor


def test_the_trace_of_a_plan_is_written_for_machines_with_device_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["--config", "gptj_tiny", *SMALL, "--plan-trace", str(trace)]
    assert finetuning.main([*arguments, "--machine", "h200"]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert finetuning.main([*arguments, "--machine", "laptop"]) == 2
    assert "devices share the host's memory" in capsys.readouterr().err


def test_virtual_devices_are_on_one_host_and_others_on_as_many_as_they_take() -> None:
    assert machine("laptop").hosts(2000) == 1
    assert [machine("h100").hosts(n) for n in (1, 8, 9, 64)] == [1, 1, 2, 8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "rtx4090",
            "NO: 10... GB of 22.08 GB device memory, 146.99 GB of 128.00 GB host memory; "
            "--execution.disk DIR takes what host memory cannot hold",
        ),
        (
            "l40s",
            "yes: 11... GB of 44.16 GB device memory, 146.99 GB of 1,500.00 GB host memory",
        ),
        ("laptop", "NO: 15[23]... GB of 16.00 GB memory; --execution.disk DIR takes .*"),
    ],
)
def test_a_plan_says_first_whether_the_machine_has_room(name: str, words: str) -> None:
    """GPT-J 6B: 14 bytes a parameter on the host, a few layers' weights on the device."""
    requirements = gptj_6b(placement="host", micro_batches_per_pass=16)
    shown = format_report(make_report("gptj_6B_gpu", requirements, machine(name)))
    assert re.fullmatch(f"fits         {words}", shown.splitlines()[2])


def test_logits_past_2_31_elements_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head_loss, "MAX_LOGIT_BYTES", 2**40)
    requirements = gptj_6b(micro_batch_size=64)
    model = requirements.config.model
    logits = 64 * model.sequence_length * model.embedding.vocab_size
    assert logits > 2**31
    (head,) = (p for p in requirements.plan.parts if p.name == "head/backward")
    assert head.device_bytes > 2 * logits  # bfloat16


def test_scheduling_hints_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--config",
        "gptj_tiny",
        "--execution.code_load",
        "true",
        "--execution.io_tiles",
        "64",
        "--plan",
    ]
    assert run_finetuning.main(arguments) == 0
    text = capsys.readouterr().out
    assert "code_load: " in text
    assert "io_tiles 64" in text


def test_a_plan_as_json_and_picture(tmp_path: Path) -> None:
    data, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["--config", "gptj_tiny", *SMALL, "--tensor_parallel", "2", "--machine", "a100"]
    wanted = ["--plan-json", str(data), "--plan-picture", str(picture)]
    assert finetuning.main([*arguments, *wanted]) == 0
    plan = json.loads(data.read_text(encoding="utf-8"))
    assert (plan["replicas"], plan["machine"], plan["hosts"]) == (2, "a100", 1)
    layer = {(p["phase"], p["direction"]): p for p in plan["phases"]}[("layer", "forward")]
    assert layer["flops"] > 0
    assert layer["seconds"]["estimate"] == max(
        layer["seconds"][name] for name in ("compute", "memory", "host", "network")
    )
    kinds = {(c["kind"], c["group_size"]) for c in layer["collectives"]}
    assert ("all_reduce", 2) in kinds
    pixels = image.imread(picture)[..., :3]
    assert pixels.min() < 0.5  # there is something
    assert pixels[:12].min() == pixels[:, :12].min() == 1  # beside a margin


def test_generation_has_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (inference.main, run_validation.main):
        assert main(["--config", "gptj_tiny", "--plan"]) == 0
        rows = {tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()}
        assert {("embeddings", "prompt"), ("layer", "prompt"), ("head", "token")} <= rows


def test_an_unknown_machine_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_finetuning.main(["--config", "tiny", "--plan", "--machine", "h1000"]) == 2
    assert "did you mean h100" in capsys.readouterr().err


@pytest.mark.slow  # four placements
def test_the_table_of_simulated_steps_is_up_to_date() -> None:
    text = plans.DOCUMENT.read_text(encoding="utf-8")
    assert plans.rewrite_tables(text) == text, "run python3 -m docs.plans"
