"""The presets of the large models, compiled for an H100 that is not there, against their plans.

Needs the packages that `tests/popxl/test_attention_compile.py` names.
"""

from __future__ import annotations

import pytest

from tests.popxl.h100 import compiled_for_an_h100, needs_the_compiler

SCRIPT = """
import popxl
from tests.popxl.hlo_kernels import traffic
from config.families import config_class_of
from config.presets import load_config, preset_data
from jax.sharding import Mesh
from planning.needs import finetuning_needs
from popxl._run.program import Program

config = load_config(config_class_of(preset_data("finetuning", "{0}"), "{0}"), "finetuning", "{0}")
needs = finetuning_needs(config, "gpu 9.0")
program = Program(needs.traced.ir, Mesh(np.array(devices), ("r",)))
program.compile()
planned = needs.traced.plan().temporaries
print(popxl.plan.memory_use(program).temporaries, planned, sep=";")
compiled = {segment.name: executable for segment, executable in program.executables.items()}
for segment, work in needs.traced.works.items():
    parts = work.parts.values()
    sums = sum(part.traffic for part in parts), sum(part.flops for part in parts)
    print(*sums, traffic(compiled[segment.name].as_text()), sep=";")
"""


@pytest.mark.slow  # half a minute each
@needs_the_compiler
@pytest.mark.parametrize(
    ("preset", "least"),
    [("gptj_6B_gpu", 0.9), ("xl_gpu", 0.9), ("xxl_gpu", 0.87), ("llama3_1_8B", 0.9)],
)
def test_all_segments_compile_and_take_what_is_planned(preset: str, least: float) -> None:
    """Entries on the device and what XLA takes inside segments, at most at a time, by XLA's own
    account: of XXL it keeps a gate's float32 values, 0.4 GB, that are planned to be computed where
    they are used. And kernels of segments with products move the bytes that are planned."""
    (taken, planned), *segments = compiled_for_an_h100(SCRIPT.replace("{0}", preset))
    assert least < int(planned) / int(taken) < 1.1
    moved = [(int(t), int(there)) for t, flops, there in segments if int(flops) > 1e12]
    assert moved
    assert sum(t for t, _ in moved) == pytest.approx(sum(there for _, there in moved), rel=0.1)
    assert all(0.85 < t / there < 1.1 for t, there in moved), moved
