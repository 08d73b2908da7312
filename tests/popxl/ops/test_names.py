"""Names of results: programs sort trees of tensors by name, and zip them."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._ir.op import Op
from popxl._ir.op_registry import registry
from popxl.ops import collectives
from popxl.transforms import autodiff
from tests.popxl.ops.harness import OpRecord
from tests.popxl.ops.test_records import DEFINED, FAMILIES

# Results of ops, as the text form shows these, if they are not `<op>_out`, or `<op>_inplace_out` of
# ops in place and views: {t} is the name of the first input.
SAY = {
    "add_": ["add_lhs_inplace_out"],
    "average_pool": ["averagepool_out"],
    "batch_norm_inference": ["batch_norm_out"],
    "cast": ["{t}_{dtype}"],
    "conv_transpose": ["convtranspose_out"],
    "dynamic_update_": ["dynamicupdateinplace_out"],
    "logical_and": ["and_out"],
    "logical_not": ["not_out"],
    "logical_or": ["or_out"],
    "nll_loss": ["loss"],
    "nll_loss_with_softmax_grad": ["loss", "dx"],
    "pow2scale_cast_from_fp8": ["{t}_{dtype}"],
    "pow2scale_cast_to_fp8": ["{t}_{dtype}"],
    "reshape": ["{t}_reshaped"],
    "reshape_": ["{t}_reshaped"],
    "scaled_add_": ["scaled_add__{t}"],
    "split": ["{t}_split_0", "{t}_split_1", "{t}_split_2"],
    "topk": ["topk_out_value", "topk_out_indices"],
    "transpose": ["{t}_T"],
    "transpose_": ["{t}_T"],
    "accumulate_": ["accumulate__{t}"],
    "accumulate_maximum_": ["accumulate_maximum__{t}"],
    "accumulate_mean_": ["accumulate_mean__{t}"],
    "accumulate_moving_average_": ["accumulate_moving_avg__{t}"],
    "accumulate_moving_average_square_": ["accumulate_moving_avg_square__{t}"],
    "accumulate_square_": ["accumulate_square__{t}"],
    "accumulator_scale_": ["accumulator_scale__{t}"],
    "copy_var_update_": ["updated__{t}"],
    "sparse_accumulate_": ["sparse_accumulate__{t}"],
}
# What functions make by an op of another name, or are told.
ALSO = {"identity": ["named"], "gather": ["tied_gather_out"], "slice": ["subsample_out"]}
SEED = np.zeros(2, np.uint32)


# ---- what records build -------------------------------------------------------------------------
def _graph_of(ir: popxl.Ir, record: OpRecord) -> popxl.Graph:
    arrays = [a.astype(record.dtypes[0]) if a.dtype == float else a for a in record.inputs]
    specs = [popxl.TensorSpec(a.shape, popxl.dtype.as_dtype(a.dtype)) for a in arrays]

    def build(*xs):
        out = record.build(*xs)
        return [out] if isinstance(out, popxl.Tensor) else list(out)

    return ir.create_graph(build, *specs)


PUBLIC = {
    name
    for module in (ops, ops.collectives, ops.var_updates)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}


def _records() -> dict[str, OpRecord]:
    """A record of each function."""
    modules = (importlib.import_module(f"tests.popxl.ops.records.{f}") for f in FAMILIES)
    records = [record for module in modules for record in module.RECORDS]
    found: dict[str, OpRecord] = {}
    for record in sorted(records, key=lambda r: r.name not in PUBLIC):
        names = filter(record.name.startswith, PUBLIC)
        found.setdefault(max(names, key=len, default=record.name), record)
    return found


def _expected(op: Op) -> list[str]:
    default = f"{op.defn.name}_{'inplace_' if op.name.endswith('_') else ''}out"
    names = SAY.get(op.name, [default] * len(op.outputs))
    t = op.inputs[0].name if op.inputs else None
    return [name.format(t=t, dtype=op.outputs[0].dtype.name) for name in names]


def _are(tensors: list[popxl.Tensor], names: list[str]) -> bool:
    """True if tensors have these names, apart from the suffixes that make them unique."""
    pairs = zip(tensors, names, strict=False)
    return all(re.fullmatch(rf"{re.escape(name)}(__t\d+)?", t.name) for t, name in pairs)


def test_results_are_called_after_their_op_or_input():
    ir, seen, records = popxl.Ir(), set(), _records()
    for record in records.values():
        with ir.main_graph:
            graph = _graph_of(ir, record)
        for op in graph.ops:
            also = ALSO.get(op.defn.name)
            assert _are(op.outputs, _expected(op)) or (also and _are(op.outputs, also)), op
            seen |= {op.name, op.defn.name}
    assert SAY.keys() <= seen
    seen |= {row[0] for row in ROWS} | WITHOUT_RESULTS | {"vjp"}
    assert PUBLIC - seen - records.keys() == set()
    for name in DEFINED - seen:  # those of gradients, and others that no function makes alone
        assert registry()[name].result == f"{name}_out"


# ---- the others ---------------------------------------------------------------------------------
WITHOUT_RESULTS = {"code_copy", "host_store", "remote_code_load", "remote_store"}


def _called():
    """A graph whose result is called `answer` in a scope."""

    def build(t):
        with popxl.name_scope("inner"):
            return ops.identity(t, "answer")

    return popxl.gir().create_graph(build, popxl.TensorSpec((4,), popxl.float32))


def _branches(t):
    return popxl.constant(True), _called(), _called(), [t], [t]


def _buffer():
    return popxl.remote_buffer((4,), popxl.float32)


def _seed():
    return popxl.constant(SEED, name="s")


def _stream(name):
    return popxl.h2d_stream((4,), popxl.float32, name)


ROWS = [
    ("call", lambda t: ops.call(_called(), t), "answer"),
    ("call_with_info", lambda t: ops.call_with_info(_called(), t).outputs, "answer"),
    ("conditional", lambda t: ops.conditional(*_branches(t)), "answer"),
    ("conditional_with_info",
     lambda t: ops.conditional_with_info(*_branches(t)).outputs, "answer"),
    ("repeat", lambda t: ops.repeat(_called(), 2, t), "answer"),
    ("repeat_with_info", lambda t: ops.repeat_with_info(_called(), 2, t).outputs, "answer"),
    ("create_random_seed",
     lambda t: ops.create_random_seed(_seed(), popxl.constant(1)), "modified_seed"),
    ("dropout", lambda t: ops.dropout(t, _seed(), 0.1), "dropout_out"),
    ("shaped_dropout", lambda t: ops.shaped_dropout(t, _seed(), (4,), 0.1), "dropout_out"),
    ("flatten", ops.flatten, "t_reshaped"),
    ("flatten_", ops.flatten_, "t_reshaped"),
    ("squeeze", ops.squeeze, "t_reshaped"),
    ("clamp", lambda t: ops.clamp(t, 0), "clip_out"),
    ("identity", ops.identity, "identity_out"),
    ("rename", lambda t: ops.rename(t, "other"), "other"),
    ("subsample", lambda t: ops.subsample(t, 2), "subsample_out"),
    ("tied_gather",
     lambda t: ops.tied_gather(t, popxl.constant([0, 1])), "tied_gather_out"),
    ("host_load", lambda t: ops.host_load(_stream("words")), "words_hostload"),
    ("host_load", lambda t: ops.host_load(_stream("words"), "other"), "other_hostload"),
    ("init", lambda t: ops.init((4,), popxl.float32), "init_out"),
    ("init", lambda t: ops.init((4,), popxl.float32, "zeros"), "zeros"),
    ("io_tile_copy", ops.io_tile_copy, "t_iotilecopy"),
    ("ipu_copy", lambda t: ops.ipu_copy(t, 3, 0), "t_c3"),
    ("print_tensor", ops.print_tensor, "print_tensor_out"),
    ("random_normal", lambda t: ops.random_normal(_seed(), (2,)), "random_normal_out"),
    ("random_uniform", lambda t: ops.random_uniform(_seed(), (2,)), "random_uniform_out"),
    ("remote_load", lambda t: ops.remote_load(_buffer(), 0, "w"), "w_remote_loaded"),
    ("remote_load", lambda t: ops.remote_load(_buffer(), 0), "buffer_1_remote_loaded"),
    ("remote_load_", lambda t: ops.remote_load_(_buffer(), 0, t), "t_remote_loaded"),
    ("split_random_seed",
     lambda t: ops.split_random_seed(_seed(), 1), "split_random_seed_out"),
    ("fp8_cast", lambda t: ops.fp8.cast(t, popxl.constant(1.0), popxl.float8_e5m2),
     "t_float8_e5m2"),
    ("all_reduce", lambda t: collectives.all_reduce([t]), "all_reduce_out"),
    ("all_reduce_identical_inputs",
     lambda t: collectives.all_reduce_identical_inputs([t]), "all_reduce_out"),
    ("all_reduce_identical_grad_inputs",
     lambda t: collectives.all_reduce_identical_grad_inputs([t]), "all_reduce_out"),
    ("replica_sharded_slice", collectives.replica_sharded_slice, "t_sharded_slice"),
    ("replicated_all_gather", collectives.replicated_all_gather, "t_all_gathered"),
    ("replicated_all_reduce", collectives.replicated_all_reduce, "t_all_reduce"),
    ("replicated_all_reduce_", collectives.replicated_all_reduce_, "t_all_reduce"),
    ("replicated_reduce_scatter", collectives.replicated_reduce_scatter, "t_reduce_scattered"),
    ("replicated_slice", collectives.replicated_slice, "replicated_slice_out"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "name"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_results_of_other_functions(build, name):
    with popxl.Ir(replication=2).main_graph, popxl.name_scope("scope"):
        results = build(popxl.variable(np.ones(4, np.float32), name="t"))
    results = [results] if isinstance(results, popxl.Tensor) else results
    assert [t.name for t in results] == [f"scope/{name}"]


def test_results_keep_the_scopes_of_the_input_that_they_are_called_after():
    """Without scopes, results of `fc1/weight` and `fc2/weight` would differ by a number only."""
    with popxl.Ir().main_graph:
        with popxl.name_scope("net"), popxl.name_scope("fc1"):
            t = popxl.variable(np.ones(4, np.float32), name="weight")
        assert ops.reshape(t, (2, 2)).name == "net/fc1/weight_reshaped"
        assert ops.var_updates.accumulate_(t, t).name == "net/fc1/accumulate__weight"
        with popxl.name_scope("net"):
            assert ops.transpose(t).name == "net/fc1/weight_T"
        with popxl.name_scope("update"):
            assert ops.transpose(t).name == "update/net/fc1/weight_T"


def test_results_in_gradient_graphs():
    with popxl.Ir().main_graph as main:
        x = popxl.TensorSpec((4,), popxl.float32)
        grad = autodiff(main.ir.create_graph(lambda x: ops.gelu(x) + ops.softmax(x, 0), x)).graph
    made = [(op.defn.name, op.outputs[0].name) for op in grad.ops]
    assert made == [("softmax_grad", "softmax_grad_out"), ("gelu_grad", "gelu_grad_out"),
                    ("grad_sum", "grad_sum_out")]  # fmt: skip
