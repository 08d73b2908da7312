"""FP8 products in what is compiled for NVIDIA GPUs, without one.

XLA's GemmRewriter makes calls of cublasLt's FP8 product of dots that it recognises: see
`xla/service/gpu/transforms/gemm_rewriter.h` in openxla/xla, and NVIDIA's guide,
docs.nvidia.com/jax-toolbox/performance-profiling/native-fp-8. The dot has two float8 operands, of
which one at most is e5m2.

To compile for an H100 that is not there takes the packages jax-cuda12-plugin and jax-cuda12-pjrt,
in the version of jax; no CUDA toolkit. `h100.txtpb` is the device, from
`xla/backends/gpu/target_config/specs` in openxla/xla.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from popxl import dtypes, ops
from popxl._core.opdef import registry

ROOT = Path(__file__).parents[2]
OP_AND_PRODUCTS = [("fp8_linear", 1), ("fp8_linear_grads", 2)]
RULES = [None, (0, True), (1, False)]


def lowered(name: str, rule: tuple[int, bool] | None, format: str = "hybrid") -> jax.stages.Lowered:
    """One of the ops for CUDA: x (4, 128, 512), weight (512, 256), bfloat16."""
    spec, bfloat16 = jax.ShapeDtypeStruct, jnp.bfloat16
    forward = ops.fp8.FORMATS[format].forward.as_jax()
    scale = [] if rule else [spec((3,), jnp.float32)]
    if name == "fp8_linear":
        attrs: dict = {}
        inputs = [spec((4, 128, 512), bfloat16), spec((512, 256), bfloat16)]
    else:
        attrs = {"results": (dtypes.bfloat16, dtypes.bfloat16)}
        two = spec((2,), jnp.float32)
        inputs = [spec((4, 128, 256), bfloat16), spec((4, 128, 512), forward)]
        inputs += [spec((512, 256), forward), two, two]
    lower = registry()[name].lower
    assert lower is not None
    meaning = partial(lower, format=format, rule=rule, **attrs)
    return jax.jit(meaning).trace(*inputs, *scale).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "products"), OP_AND_PRODUCTS)
def test_products_are_dots_of_float8_with_float32_results(name, products, rule):
    dots = re.findall(r"stablehlo\.dot_general.*: \((.*)\) -> (.*)", lowered(name, rule).as_text())
    assert len(dots) == products
    for operands, result in dots:
        kinds = re.findall(r"x(f\w+)>", operands)
        assert "f8E4M3FN" in kinds
        assert set(kinds) <= {"f8E4M3FN", "f8E5M2"}
        assert result.endswith("xf32>")


DEVICES = """
import sys
import numpy as np
from jax.experimental import topologies
from tests.popxl.test_fp8_compile import OP_AND_PRODUCTS, ROOT, RULES, lowered

target = (ROOT / "tests/popxl/h100.txtpb").read_text()
topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
devices = topology.devices
PRODUCT = '"__cublas$lt$matmul$f8"'
"""

OPS = """
from jax._src import compiler
from jax._src.lib import _jax
options = compiler.get_compile_options(
    1, 1, device_assignment=np.zeros((1, 1), int), backend=devices[0].client
)
for format in ("hybrid", "e4m3"):
    for name, products in OP_AND_PRODUCTS:
        for rule in RULES:
            found = devices[0].client.compile(
                lowered(name, rule, format).compiler_ir("stablehlo"),
                executable_devices=_jax.DeviceList(tuple(devices)),
                compile_options=options,
            ).hlo_modules()[0].to_string()
            print(format, name, rule, found.count(PRODUCT), products)
"""

LAYERS = """
from config.gptj import GPTJConfig
from config.presets import load_config
from jax.sharding import Mesh
from modelling.phases.training import build_training
from modelling.spec import family_of
from popxl._lower.compile import compile_lowered
from popxl._lower.program import Program
from popxl._lower.segment import lower_segment

settings = {"model": {"precision": "bfloat16"}}
config = load_config(GPTJConfig, "finetuning", "gptj_tiny_fp8", settings)
ir = build_training(config, family_of(config).layout).ir
program = Program(ir, Mesh(np.array(devices), ("r",)))
for segment in program.schedule.segments:
    one = lower_segment(segment, program.mesh, program.specs_of(segment)[0])
    if "f8E4M3FN" in one.as_text():
        print(compile_lowered(one, "gpu").as_text().count(PRODUCT), segment.name)
"""


def compiled_for_an_h100(script: str) -> list[list[str]]:
    """Words of the lines that `script` prints, after `DEVICES`, in a process of its own.

    Triton is off: XLA weighs it against cublasLt by timing both on the device.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime/src"), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", DEVICES + script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


needs_the_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"), reason="jax-cuda12-plugin is not installed"
)


@pytest.mark.slow
@needs_the_compiler
def test_each_product_is_a_call_of_cublas_on_an_h100():
    lines = compiled_for_an_h100(OPS)
    assert len(lines) == 2 * len(OP_AND_PRODUCTS) * len(RULES)
    assert all(calls == products for *_, calls, products in lines), lines


@pytest.mark.slow
@needs_the_compiler
def test_so_are_the_products_of_a_models_linear_layers():
    """GPT-J's layer has four: queries, keys and values in one, the output, and two of the
    feed-forward. Each is one product forwards, which is computed again, and two backwards."""
    lines = compiled_for_an_h100(LAYERS)
    found = sorted((name.partition("_")[0], int(calls)) for calls, name in lines)
    assert found == [("Block", 4), ("Block", 4), ("Block", 8)], lines
