"""The text form of programs: what a person sees of a graph."""

from __future__ import annotations

import re

import numpy as np

import popxl
from popxl import ops


def _program() -> popxl.Ir:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.name_scope("layer"):
        w = popxl.variable(np.ones((2, 3), np.float32), name="w")
        buffer = popxl.remote_buffer((3,), popxl.float16, 4)
        popxl.remote_variable(np.ones(3, np.float16), buffer, 1, name="r")
        c = popxl.constant(np.float32(0.5), name="half")

        def fn(a, total: popxl.TensorByRef):
            total += a
            return ops.matmul(a, ops.transpose_(a))

        graph = ir.create_graph(fn, w, w)
        info = ops.call_with_info(graph, w, w)
        info.set_parent_input_modified(w)
        with popxl.ipu(1), popxl.io_tiles():
            ops.repeat(ir.create_graph(lambda t: t * 2.0, c), 3, c)
        pairs = ir.replica_grouping(1, 1)
        ops.collectives.replicated_all_reduce(c, "mean", pairs)
        ops.remote_load(buffer, 2)
    return ir


EXPECTED = """\
ir replicas=2 host_transfers=1
RemoteBuffer[1 popxl.dtypes.float16 (3,) entries=4]
graph @main() -> () {
  %layer/w: float32[2, 3] = variable ReplicaGrouping(num_replicas=2, stride=1, group_size=2, num_groups=1) one_per_group
  %layer/r: float16[3] = variable ReplicaGrouping(num_replicas=2, stride=1, group_size=2, num_groups=1) one_per_group in RemoteBuffer[1 popxl.dtypes.float16 (3,) entries=4] at 1
  %layer/half: float32[] = constant 0.5
  %layer/matmul_out: float32[2, 2] = call(%layer/w, %layer/w) graph=@_program.fn_subgraph(0) modifies=[0, 1]
  %layer/mul_out: float32[] = repeat(%layer/half) graph=@_program.<lambda>_subgraph(0) count=3 carried=1  # ipu=1 io
  %layer/half_all_reduce: float32[] = replicated_all_reduce(%layer/half) op=mean group=ReplicaGrouping(num_replicas=2, stride=1, group_size=1, num_groups=2)
  %layer/buffer_1_remote_loaded: float16[3] = remote_load() buffer=RemoteBuffer[1 popxl.dtypes.float16 (3,) entries=4] offset=2
}
graph @_program.fn_subgraph(0)(%a: float32[2, 3], %total: &float32[2, 3]) -> (%matmul_out) {
  %add_lhs_inplace_out: float32[2, 3] = add_(%total, %a)
  %a_T: float32[3, 2] = transpose_(%a) permutation=[1, 0]
  %matmul_out: float32[2, 2] = matmul(%a, %a_T)
}
graph @_program.<lambda>_subgraph(0)(%t: float32[]) -> (%mul_out) {
  %c: float32[] = constant 2.0
  %mul_out: float32[] = mul(%t, %c)  # ipu=1 io
}"""  # noqa: E501


def test_a_whole_program():
    assert str(_program()) == EXPECTED


def test_a_graph_and_an_op_alone():
    ir = _program()
    graph = ir.main_graph.called_graphs[0]
    assert str(graph) in str(ir)
    assert str(graph.ops[0]) == "%add_lhs_inplace_out: float32[2, 3] = add_(%total, %a)"
    assert re.fullmatch(r"<Op add_ at .*test_printing.py:\d+>", repr(graph.ops[0]))
    assert repr(graph).startswith("Graph[id=_program.fn_subgraph(0)")


def test_shards_show_the_whole_they_come_from():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        popxl.replica_sharded_variable(np.ones((3, 2), np.float32), name="s")
    assert "%s_shard: float32[3] of [3, 2] = shard of %s" in str(ir)
    assert "%s: float32[3, 2] = variable" in str(ir)


def test_long_chains_of_suffixes_are_cut_in_the_text_alone():
    ir = popxl.Ir()
    with ir.main_graph, popxl.name_scope("layer"):
        long = popxl.variable(np.ones((2, 2), np.float32), name="v" * 60)
        w = popxl.variable(np.ones((2, 2), np.float32), name="weight")
        for _ in range(2):
            t = w
            for _ in range(20):
                t = ops.transpose(t)
            ops.cast(t, popxl.float16)
    last = ir.main_graph.ops[-1].outputs[0]
    assert last.name == "layer/weight_T__t0" + 19 * "_T" + "_float16"
    first, second = (text for text in str(ir).splitlines() if " cast(" in text)
    assert first.startswith("  %layer/weight_T_T_T_T_T_T_T_T.._T_T_T_T_float16: float16[2, 2] = ")
    assert second.startswith("  %layer/weight_T__t0_T_T_T_T_T.._T_T_T_T_float16: float16[2, 2] = ")
    assert f"%layer/{long.name.removeprefix('layer/')}: float32" in str(ir)  # a name of one's own
    results = re.findall(r"^  %(\S+): .* = (?!variable)", str(ir), re.MULTILINE)
    assert len(set(results)) == len(ir.main_graph.ops)  # each result is still told from the others
    assert max(map(len, results)) < 50
    assert set(re.findall(r"transpose\(%(\S+)\)", str(ir))) <= {"layer/weight", *results}
    assert all(f"%{name}: " in str(ir.main_graph.functional) for name in results)
