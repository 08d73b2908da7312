"""Attention in what is compiled for NVIDIA GPUs, without one: one kernel forwards, one backwards.

On top of what `h100.py` names it takes the packages nvidia-cudnn-cu12, nvidia-cublas-cu12,
nvidia-cuda-nvcc-cu12 and nvidia-cuda-nvrtc-cu12, with their lib folders on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from popxl._ir.op_registry import registry
from popxl.ops._attention_math import AttentionAttrs
from popxl.ops._reductions import tracing_platform
from popxl.ops.fused_attention import attention_grads_kernel, attention_kernel
from tests.popxl.h100 import compiled_for_an_h100, needs_the_compiler

HEADS, TOKENS, FEATURES = 8, 512, 64
PLAIN = AttentionAttrs(1.0, 0, 0.0, False, None, None, False, False, False)
CASES = {  # settings, heads of keys, shapes of biases, of places and lengths; "... 256": of a head
    "T5": (PLAIN._replace(biases=1, lengths=True), HEADS, [(1, HEADS, TOKENS, TOKENS)], [(4,)]),
    "GPT-J": (PLAIN._replace(causal=True), HEADS, [], []),
    "grouped, window": (PLAIN._replace(causal=True, window=(127, 0)), 2, [], []),
    "causal 256": (PLAIN._replace(causal=True), HEADS, [], []),
    "packed 256": (PLAIN._replace(causal=True, segments=True), HEADS, [], [(4, TOKENS)] * 2),
    "packed": (PLAIN._replace(causal=True, segments=True), 2, [], [(4, TOKENS)] * 2),
    "long": (PLAIN._replace(causal=True), 2, [], []),
}
REFUSED = {
    "dropout": PLAIN._replace(p=0.1),
    "cap": PLAIN._replace(cap=30.0),
}

SCRIPT = """
import re
from tests.popxl.test_attention_compile import CASES, REFUSED, lowered

def calls(hlo):
    return ",".join(sorted(re.findall(r'custom_call_target="__cudnn[$](\\w+)"', hlo)))

for name in (*CASES, *REFUSED):
    print(name, calls(compiled(lowered(name))), sep=";")
"""


def both_ways(settings: AttentionAttrs):
    """Forwards and backwards in one program, as where a layer is recomputed."""
    forward, backward = (registry()[f"fused_attention{end}"].lower for end in ("", "_grads"))

    def run(dy, q, k, v, *rest):
        y, statistics = forward(q, k, v, *rest, **settings._asdict())
        return y, *backward(dy, q, k, v, y, statistics, *rest, **settings._asdict())

    return run


def lowered(name: str) -> jax.stages.Lowered:
    """Lowers for CUDA, in bfloat16."""
    plain = REFUSED.get(name, PLAIN), HEADS, [], [(2,)] if name == "dropout" else []
    settings, groups, biases, others = CASES.get(name, plain)
    features = 256 if name.endswith("256") else FEATURES
    tokens = 2**14 if name == "long" else TOKENS
    shapes = [(4, tokens, HEADS, features)]
    shapes += [(4, heads, tokens, features) for heads in (HEADS, groups, groups)]
    specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    specs += [jax.ShapeDtypeStruct(s, jnp.float32) for s in biases]
    kind = jnp.uint32 if name == "dropout" else jnp.int32
    specs += [jax.ShapeDtypeStruct(s, kind) for s in others]
    with tracing_platform("gpu 9.0"):
        traced = jax.jit(both_ways(settings)).trace(*specs)
    return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.slow
@needs_the_compiler
@pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cudnn") is None,
    reason="nvidia-cudnn-cu12 is not installed",
)
def test_attention_is_one_kernel_each_way_on_an_h100():
    found = dict(compiled_for_an_h100(SCRIPT))
    biased = "fmhaScaleBiasSoftmax,fmhaScaleBiasSoftmaxBackward"
    assert found == {
        "T5": biased,
        "GPT-J": "fmhaSoftmax,fmhaSoftmaxBackward",
        "grouped, window": "fmhaSoftmax,fmhaSoftmaxBackward",
        "packed": biased,
        # 17 GB of the scores' gradients, 4 at a time.
        "long": "fmhaSoftmax,fmhaSoftmaxBackward",
        "causal 256": "fmhaSoftmax,fmhaSoftmaxBackward",
        "packed 256": biased,
        "dropout": "",
        "cap": "",
    }


@pytest.mark.parametrize(
    ("target", "largest"),
    [
        ("gpu", 128),
        ("gpu 7.5", 0),
        ("gpu 8.9", 128),
        ("gpu 9.0", 256),
        ("gpu 10.0", 128),
        ("cpu", 0),
    ],
)
def test_heads_that_cudnn_takes(target: str, largest: int):
    """Hopper alone has kernels for 256 features, Turing and older GPUs none."""
    settings = PLAIN._replace(causal=True)
    found = []
    for size in (64, 128, 256, 512):
        shapes = [(1, 256, 2, size), *[(1, 2, 256, size)] * 3]
        specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        with tracing_platform(target):
            text = str(jax.make_jaxpr(both_ways(settings))(*specs))
        kernels = {f.__name__ in text for f in (attention_kernel, attention_grads_kernel)}
        assert len(kernels) == 1
        found += [size] * kernels.pop()
    assert max(found, default=0) == largest


@pytest.mark.parametrize(("sinks", "values"), [(False, 64), (True, 64), (False, 32)])
def test_attention_with_sinks_or_narrow_values_is_no_kernel_but_a_loop(sinks: bool, values: int):
    """cuDNN's has no sinks, and as many features of values as of keys."""
    shapes = [(1, 256, 2, values), *((1, 2, 256, n) for n in (64, 64, values))]
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [*shapes, *[(2,)] * sinks]]
    with tracing_platform("gpu 9.0"):
        settings = PLAIN._replace(causal=True, sinks=sinks)
        text = str(jax.make_jaxpr(both_ways(settings))(*specs))
    is_kernel = not sinks and values == 64
    assert (attention_kernel.__name__ in text) == is_kernel
    assert (attention_grads_kernel.__name__ in text) == is_kernel
