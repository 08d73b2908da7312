"""The presets of the large models, compiled for an H100 or H200 that is not there, against their
plans.

    python3 -m tests.planning.test_h100     # rewrites the record of planned memory

Needs the packages that `tests/popxl/test_attention_compile.py` names.
"""

from __future__ import annotations

import json
from datetime import date
from itertools import product

import pytest

from tests.popxl.h100 import H100, H200, ROOT, compiled_for_an_h100, needs_the_compiler

SCRIPT = """
from tests.popxl.hlo_kernels import traffic
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from jax.sharding import Mesh
from planning.requirements import finetuning_requirements
from popxl._run.program import Program

family = config_class_of_preset(load_preset("finetuning", "{0}"), "{0}")
config = load_config(family, "finetuning", "{0}")
requirements = finetuning_requirements(config, "gpu 9.0")
program = Program(requirements.traced.ir, Mesh(np.array(devices), ("r",)))
program.compile()
compiled = {segment.name: executable for segment, executable in program.executables.items()}
for segment, cost in requirements.traced.segment_costs.items():
    parts = cost.parts.values()
    sums = sum(part.traffic for part in parts), sum(part.flops for part in parts)
    print(*sums, traffic(compiled[segment.name].as_text()), sep=";")
"""


MEMORY = """
from dataclasses import replace
from planning.hardware.machines import machine
from config.presets import merge_over
from planning.requirements import plan_on_machine

there = machine("{1}")
family = config_class_of_preset(load_preset("finetuning", "{0}"), "{0}")
config = family.from_dict(merge_over(load_preset("finetuning", "{0}"), {2}))
traced = plan_on_machine(finetuning_requirements(config, there.target), there).traced
program = Program(traced.ir, Mesh(np.array(devices), ("r",)))
program.compile()
taken = {s.name: e.memory_analysis().temp_size_in_bytes for s, e in program.executables.items()}
rates = there.achieved_rates("bfloat16", 1)
for each in (traced, replace(traced, temporaries=lambda segment: taken[segment.name])):
    run = each.timeline(rates)
    print(traced.permanent_storage().fixed_device_bytes + run.peak, run.extent, sep=";")
"""
MEMORY = SCRIPT.partition("config = ")[0] + MEMORY
QWEN2_5_7B = {
    "model": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "training": {
        "global_batch_size": 128,
        "gradient_dtype": "bfloat16",
        "optimizer": {"state": "bfloat16"},
    },
    "execution": {"micro_batch_size": 4},
}
CASES = {
    **{name: (name, {}) for name in ("gptj_6B_gpu", "gptj_6B_gpu_fp8", "xl_gpu", "xxl_gpu")},
    "llama3_1_8B": ("llama3_1_8B", {}),
    "Qwen2.5 7B": ("qwen3_0_6B", QWEN2_5_7B),
}
MACHINES = {"h100": H100, "h200": H200}
MOST = 1.15, 1 / 0.99
"""Of XLA's bytes, and of the planned ones."""
RECORD = ROOT / "benchmarks/results/planned_memory.json"


@pytest.mark.slow  # two minutes each
@needs_the_compiler
@pytest.mark.parametrize("on", MACHINES)
@pytest.mark.parametrize(("preset", "changes"), CASES.values(), ids=CASES)
def test_a_run_takes_the_memory_that_is_planned(preset: str, changes: dict, on: str) -> None:
    """Entries on the device, as the plan places them, and what XLA takes inside segments, at most
    at a time, by XLA's own account of each; the same with the gaps between arrays."""
    for ours, theirs in zip(*planned_and_taken(preset, changes, on), strict=True):
        check_bytes(ours, theirs)


def planned_and_taken(preset: str, changes: dict, on: str) -> list[list[int]]:
    """Bytes on the device and with gaps: as planned, then by XLA's account."""
    script = MEMORY.replace("{0}", preset).replace("{1}", on).replace("{2}", repr(changes))
    return [[*map(int, line)] for line in compiled_for_an_h100(script, MACHINES[on])]


def check_bytes(planned: int, taken: int) -> None:
    assert planned <= MOST[0] * taken
    assert taken <= MOST[1] * planned


def test_the_record_has_all_cases_within_their_bounds() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    assert sorted((r["preset"], r["machine"]) for r in rows) == sorted(product(CASES, MACHINES))
    for row in rows:
        check_bytes(row["planned"], row["xla"])
        check_bytes(row["planned_with_gaps"], row["xla_with_gaps"])


def write_record() -> None:
    rows = []
    for on, (name, case) in product(MACHINES, CASES.items()):
        (planned, with_gaps), (xla, xla_with_gaps) = planned_and_taken(*case, on)
        row = {"machine": on, "preset": name, "planned": planned, "xla": xla}
        rows.append(row | {"planned_with_gaps": with_gaps, "xla_with_gaps": xla_with_gaps})
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record |= {"date": str(date.today()), "rows": rows}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(record | {"rows": []}, indent=1)
    RECORD.write_text(
        head.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n", encoding="utf-8"
    )


@pytest.mark.slow  # half a minute each
@needs_the_compiler
@pytest.mark.parametrize(
    "preset", ["gptj_6B_gpu", "gptj_6B_gpu_fp8", "xl_gpu", "xxl_gpu", "llama3_1_8B"]
)
def test_kernels_move_the_bytes_that_are_planned(preset: str) -> None:
    """Those of segments with products."""
    segments = compiled_for_an_h100(SCRIPT.replace("{0}", preset))
    moved = [(int(t), int(there)) for t, flops, there in segments if int(flops) > 1e12]
    assert moved
    assert sum(t for t, _ in moved) == pytest.approx(sum(there for _, there in moved), rel=0.1)
    assert all(0.85 < t / there < 1.1 for t, there in moved), moved


if __name__ == "__main__":
    write_record()
