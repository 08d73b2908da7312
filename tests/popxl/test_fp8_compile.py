"""FP8 products in what is compiled for NVIDIA GPUs, without one.

XLA's GemmRewriter makes calls of cublasLt's FP8 product of dots that it recognises: see
`xla/service/gpu/transforms/gemm_rewriter.h` in openxla/xla, and NVIDIA's guide,
docs.nvidia.com/jax-toolbox/performance-profiling/native-fp-8. The dot has two float8 operands, of
which one at most is e5m2. Where they are scaled back before the dot, the call gives bfloat16 and
takes a bias; otherwise it gives float32, and a second kernel scales.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from popxl import dtypes, ops
from popxl._ir.op_registry import registry
from tests.popxl.h100 import compiled_for_an_h100, needs_the_compiler

OP_AND_PRODUCTS = [("fp8_linear", 1), ("fp8_linear_grads", 2)]
RULES_AND_EXACT = [(None, True), (None, False), ((0, True), True), ((1, False), False)]
"""Rules, where None means delayed scaling, and whether scales are powers of two."""


def lowered(
    name: str, rule: tuple[int, bool] | None, exact: bool, format: str = "hybrid"
) -> jax.stages.Lowered:
    """Lowers one of the ops for CUDA: x (4, 128, 512), weight (512, 256), bfloat16."""
    spec, bfloat16 = jax.ShapeDtypeStruct, jnp.bfloat16
    forward = ops.fp8.FORMATS[format].forward.as_jax()
    scale = [] if rule else [spec((3,), jnp.float32)]
    own = [spec((), jnp.float32)] * 2
    inputs = [spec((4, 128, 512), forward), *own, spec((512, 256), forward), *own]
    attrs: dict = {"io_dtypes": (dtypes.bfloat16,) * 3}
    if name == "fp8_linear_grads":
        attrs = {"results": (dtypes.bfloat16, dtypes.bfloat16)}
        inputs = [*[spec((4, 128, 256), bfloat16)] * 2, *inputs]
    lower = registry()[name].lower
    assert lower is not None
    meaning = partial(lower, format=format, rule=rule, exact=exact, **attrs)
    return jax.jit(meaning).trace(*inputs, *scale).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("rule", "exact"), RULES_AND_EXACT)
@pytest.mark.parametrize(("name", "products"), OP_AND_PRODUCTS)
def test_products_are_dots_in_a_form_that_xla_recognises(name, products, rule, exact):
    text = lowered(name, rule, exact).as_text()
    dots = re.findall(r"stablehlo\.dot_general.*: \((.*)\) -> (.*)", text)
    assert len(dots) == products
    for operands, result in dots:
        kinds = re.findall(r"x(f\w+|bf16)>", operands)
        assert kinds == ["bf16", "bf16"] if exact else "f8E4M3FN" in kinds
        assert set(kinds) <= {"bf16", "f8E4M3FN", "f8E5M2"}
        assert result.endswith("xbf16>" if exact else "xf32>")
    scaled_back = re.findall(r"stablehlo\.convert.*xf8E\w+>\) -> .*xbf16>", text)
    assert len(scaled_back) == (2 * products if exact else 0)


def calls(hlo: str) -> str:
    """Type of the result and epilogue of each FP8 product, sorted: "bf16 BIAS,bf16 DEFAULT"."""
    lines = [line for line in hlo.splitlines() if '"__cublas$lt$matmul$f8"' in line]
    kinds = [re.search(r"= \(?(\w+)\[", line) for line in lines]
    epilogues = [re.search(r'"epilogue":"(\w+)"', line) for line in lines]
    return ",".join(
        sorted(f"{k[1]} {e[1]}" for k, e in zip(kinds, epilogues, strict=True) if k and e)
    )


OPS = """
from tests.popxl.test_fp8_compile import OP_AND_PRODUCTS, RULES_AND_EXACT, calls, lowered

for format in ("hybrid", "e4m3"):
    for name, products in OP_AND_PRODUCTS:
        for rule, exact in RULES_AND_EXACT:
            found = compiled(lowered(name, rule, exact, format))
            print(products, exact, calls(found), sep=";")
"""

LAYERS = """
from config.gptj import GPTJConfig
from config.presets import load_config
from jax.sharding import Mesh
from modelling.phases.training import build_training_program
from modelling.model_family import get_family
from popxl._compile.xla_compile import compile_lowered
from popxl._run.program import Program
from popxl._compile.segment_function import lower_segment
from tests.popxl.test_fp8_compile import calls

settings = {"model": {"precision": "bfloat16"}}
config = load_config(GPTJConfig, "finetuning", "gptj_tiny_fp8", settings)
ir = build_training_program(config, get_family(config).build_phases).ir
program = Program(ir, Mesh(np.array(devices), ("r",)))
for segment in program.schedule.segments:
    one = lower_segment(segment, program.mesh, program.specs_of(segment)[0])
    if "f8E4M3FN" in one.as_text():
        print(segment.name.partition("_")[0], calls(compile_lowered(one, "gpu").as_text()), sep=";")
"""


ACTIVATION = """
import jax
import jax.numpy as jnp
from popxl.ops._computed_apart import _shift_by_zero
from popxl.ops.activation import _GELU
from popxl.ops.fp8_e4m3_e5m2 import _OPERAND
from popxl.ops._reductions import tracing_platform
from tests.popxl.hlo_kernels import traffic



def rounded(x, scale):
    y, apart = map(_GELU.lower, (x, _shift_by_zero(x, 1)))
    return _OPERAND.lower(y, apart, scale, operand_index=0, format="hybrid")


spec = jax.ShapeDtypeStruct
specs = spec((8, 1024, 16384), jnp.bfloat16), spec((3,), jnp.float32)
with tracing_platform("gpu 9.0"):
    lowered = jax.jit(rounded).trace(*specs).lower(lowering_platforms=("cuda",))
print(traffic(compiled(lowered)) / (8 * 1024 * 16384))
"""


@pytest.mark.slow
@needs_the_compiler
def test_an_activation_is_rounded_as_it_is_computed():
    """One kernel reads two bytes and writes one of each element; else each would move seven."""
    ((nbytes,),) = compiled_for_an_h100(ACTIVATION)
    assert float(nbytes) == pytest.approx(3, rel=0.05)


@pytest.mark.slow
@needs_the_compiler
def test_each_product_is_a_call_of_cublas_on_an_h100():
    lines = compiled_for_an_h100(OPS)
    assert len(lines) == 2 * len(OP_AND_PRODUCTS) * len(RULES_AND_EXACT)
    for products, exact, found in lines:
        kind = "bf16" if exact == "True" else "f32"
        assert found.split(",") == [f"{kind} DEFAULT"] * int(products), lines


@pytest.mark.slow
@needs_the_compiler
def test_so_are_the_products_of_a_models_linear_layers():
    """GPT-J's layer has four: queries, keys and values in one, the output, and two of the
    feed-forward, of which the first adds its bias. Each is one product forwards and two backwards.
    The two of which only the layer's output is made are not computed again. Gradients of weights
    are in float32, and added to the accumulators."""
    lines = compiled_for_an_h100(LAYERS)
    found = sorted((name, *calls.split(",")) for name, calls in lines)
    backward = *["bf16 DEFAULT"] * 4, *["f32 DEFAULT"] * 4
    forward = ("bf16 BIAS", *["bf16 DEFAULT"] * 3)
    again = forward[:2]
    assert found == [("loop", *again), ("loop", *forward), ("loop", *backward)], lines
