"""Collectives of each layer, forwards and backwards, as compiled.

A sharded computation sums once where it closes and, backwards, once for each input it opened with.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from modelling.t5 import DecoderBlock, DecoderHead, Embeddings, EncoderBlock, EncoderFinalNorm
from popxl import TensorSpec
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.modelling.harness import small_config
from tests.popxl.compiled import optimised

CONFIG = small_config(2)
WIDE, NARROW = (TensorSpec((2, n, 16), popxl.float32) for n in (12, 4))
WORDS, LABELS = (TensorSpec((2, n), popxl.int32) for n in (12, 4))
LAYERS = {
    # (module, inputs): all-reduces forwards, and more of them backwards
    "embeddings": (Embeddings, [WORDS], 1, 0),
    "encoder layer": (EncoderBlock, [WIDE, WORDS], 2, 2),
    "encoder head": (EncoderFinalNorm, [WIDE], 0, 0),
    # Cross-attention opens with two inputs, the decoder's and the encoder's.
    "decoder layer": (DecoderBlock, [NARROW, WIDE, WORDS], 3, 4),
    # The loss exchanges the largest logits, the sums of exponentials and the labels' logits.
    "head": (DecoderHead, [NARROW, LABELS, TensorSpec((), popxl.float32)], 3, 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_of_a_layer(name):
    module, specs, forwards, backwards = LAYERS[name]
    assert collectives(module, specs, gradient=False) == forwards
    assert collectives(module, specs, gradient=True) == forwards + backwards


def collectives(module: type[addons.Module], specs: list[TensorSpec], gradient: bool) -> int:
    """Collectives in the compiled program of a layer at tensor parallelism 2."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        inputs = [popxl.variable(np.zeros(s.shape), s.dtype) for s in specs]
        facts, graph = module(CONFIG).create_graph(*specs)
        bound = graph.bind(facts.init())
        if gradient:
            grad = graph.autodiff()
            info = bound.call_with_info(*inputs)
            given = popxl.constant(np.ones(graph.graph.outputs[0].shape), popxl.float32)
            outputs = grad.call(given, args=grad.grad_graph_info.inputs_dict(info))
            addons.host_store(info.parent_output(0))
        else:
            outputs = bound.call(*inputs)
        for t in outputs:
            addons.host_store(t)
    apply_pre_alias_patterns(ir)
    text = optimised(popxl.Session(ir, "cpu"))
    # An all-reduce of several values, which XLA makes of neighbours, has a type in parentheses.
    reduces = re.findall(r" = (\(?[^=\n]*?) all-reduce(?:-start)?\(", text)
    others = re.findall(r" (?:all-gather|reduce-scatter|collective-permute|all-to-all)\(", text)
    assert not others
    return sum(len(re.findall(r"f32\[|s32\[", kind)) for kind in reduces)
