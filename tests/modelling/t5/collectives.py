"""How many collectives a compiled layer has."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

import popxl
import popxl_addons as addons
from config.t5 import T5Config
from popxl import TensorSpec
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.modelling.harness import small_config
from tests.popxl.compiled import optimised

CONFIG = small_config(2)


def collectives(
    module: Callable[[T5Config], addons.Module], specs: list[TensorSpec], gradient: bool
) -> int:
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
