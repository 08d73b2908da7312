import numpy as np
import pytest

import popxl
from popxl import ops
from popxl_addons import NamedTensors, NamedVariableFactories, VariableFactory
from popxl_addons.named_replica_grouping import (
    NamedReplicaGrouping,
    fill_none_group,
    get_ild_replica_grouping,
    get_ild_size_from_popdist,
    get_instance_replica_grouping,
    is_cross_ild,
    is_cross_instance,
)
from popxl_addons.rts import (
    all_gather_replica_sharded_graph,
    gather_replica_sharded_tensor,
    reduce_replica_sharded_graph,
    reduce_replica_sharded_tensor,
    replica_sharded_spec,
)
from popxl_addons.sharding import num_shards_of_spec
from tests.popxl_addons.helpers import replicas_run
from tests.slow import slow

REPLICAS = 4
GRADS = np.random.default_rng(0).normal(size=(REPLICAS, 3, 4)).astype(np.float32)
ODD = GRADS[:, :, :3]
GROUPS = {"pairs": (1, 2), "halves": (2, 2), "all": (1, 4), "none": (1, 1)}


def grouping(name):
    return popxl.gir().replica_grouping(*GROUPS[name])


@pytest.mark.parametrize(
    ("op", "shard", "over"),
    [
        (op, shard, over) if op == "add" or shard == over else slow(op, shard, over)
        for op in ("add", "mean")
        for shard in GROUPS
        for over in GROUPS
    ],
)
def test_reduce_then_gather_is_an_all_reduce(op, shard, over):
    """Also where values repeat over replicas that share the parts (shard > over)."""
    groups = {}

    def build(g):
        groups["over"] = grouping(over)
        shard_group = grouping(shard)
        part = reduce_replica_sharded_tensor(g, op, groups["over"], shard_group)
        size = shard_group.group_size
        assert part.shape == ((12 // size,) if size > 1 else (3, 4))
        return [gather_replica_sharded_tensor(part, replica_group=shard_group)]

    # Replicas that share parts but are not reduced together must have equal values before.
    if shard in ("pairs", "halves", "all"):
        data = repeat_over(GRADS, over, shard)
    else:
        data = GRADS
    (result,) = replicas_run(REPLICAS, build, {"g": data})
    reduce = np.sum if op == "add" else np.mean
    for members in groups["over"].groups:
        wanted = reduce(data[list(members)], axis=0)
        for replica in members:
            np.testing.assert_allclose(result[replica], wanted, rtol=1e-5)


def repeat_over(data, over, shard):
    """Data that are equal on replicas of one shard group with the same place in `over`'s groups."""
    ir = popxl.Ir(replication=REPLICAS)
    with ir.main_graph:
        groups, shards = grouping(over), grouping(shard)
    out = data.copy()
    for members in shards.groups:
        parts = [groups.assignment[r] for r in members]
        if len(set(parts)) > 1:
            # Each reduce group must give the same result: give it the same set of values.
            for g in sorted(set(groups.assignment)):
                for place, replica in enumerate(groups.groups[g]):
                    out[replica] = data[groups.groups[0][place]]
    return out


@pytest.mark.parametrize("shard", ["pairs", "all"])
def test_what_replicas_cannot_share_evenly_stays_whole(shard):
    def build(g):
        part = reduce_replica_sharded_tensor(g, "add", None, grouping(shard))
        assert (part.shape, part.meta_shape) == ((3, 3), ())
        return [part]

    (result,) = replicas_run(REPLICAS, build, {"g": ODD})
    for replica in range(REPLICAS):
        np.testing.assert_allclose(result[replica], ODD.sum(0), rtol=1e-5, atol=1e-6)


def test_fewer_shards_than_replicas_share_a_tensor():
    def build():
        ir = popxl.gir()
        data = np.arange(9, dtype=np.float32).reshape(3, 3)
        buffer = popxl.replica_sharded_buffer((3, 3), popxl.float32, None, 2)
        popxl.remote_replica_sharded_variable(data, buffer)
        shard = popxl.ops.remote_load(buffer, 0)
        assert num_shards_of_spec(shard.spec, ir.replication_factor) == 2
        return [gather_replica_sharded_tensor(shard)]

    (result,) = replicas_run(REPLICAS, build)
    for replica in range(REPLICAS):
        np.testing.assert_array_equal(result[replica].ravel(), np.arange(9))


def test_graphs_reduce_and_gather_by_name():
    def build(g):
        pairs = grouping("pairs")
        tensors = NamedTensors(w=g, deep=NamedTensors(s=popxl.constant(2.0)))
        groups = NamedReplicaGrouping.build_groups(["w", "deep.s"], pairs)
        reduce, names = reduce_replica_sharded_graph(tensors, shard_groups=groups)
        parts = NamedTensors.pack(names, reduce.bind(tensors).call())
        assert (parts.w.shape, parts.w.meta_shape, parts.deep.s.shape) == ((6,), (3, 4), ())
        gather, names = all_gather_replica_sharded_graph(parts, replica_groups=groups)
        return list(gather.bind(parts).call())

    s, w = replicas_run(REPLICAS, build, {"g": GRADS})
    np.testing.assert_allclose(w[2], GRADS.sum(0), rtol=1e-5)
    assert s.tolist() == [8] * REPLICAS


@pytest.mark.parametrize("use_io_tiles", [False, True])
def test_io_tiles_change_no_result(use_io_tiles):
    def build(g):
        tensors = NamedTensors(w=g)
        reduce, _ = reduce_replica_sharded_graph(tensors, use_io_tiles=use_io_tiles)
        parts = NamedTensors(w=reduce.bind(tensors).call()[0])
        gather, _ = all_gather_replica_sharded_graph(parts, use_io_tiles)
        return list(gather.bind(parts).call())

    (w,) = replicas_run(REPLICAS, build, {"g": GRADS})
    np.testing.assert_allclose(w[0], GRADS.sum(0), rtol=1e-5)


def test_spec_of_a_part():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        everyone = ir.replica_grouping()
        w = popxl.constant(np.zeros((3, 4), np.float16))
        spec = replica_sharded_spec(w, everyone)
        assert spec == popxl.TensorSpec((3,), popxl.float16, (3, 4))
        for shape in ((3,), (3, 3), ()):
            whole = popxl.constant(np.zeros(shape, np.float16))
            assert replica_sharded_spec(whole, everyone) == whole.spec
        assert replica_sharded_spec(w, ir.replica_grouping(group_size=1)) == w.spec
        part = ops.init((6,), popxl.float16, meta_shape=(3, 4))  # cut already: not cut again
        assert replica_sharded_spec(part, everyone) == part.spec
        with pytest.raises(ValueError, match="4 shards, a number that does not divide groups of 2"):
            num_shards_of_spec(spec, 2)


def test_graphs_are_written_from_factories():
    ir = popxl.Ir(replication=REPLICAS)
    with ir.main_graph:
        cut = VariableFactory(lambda: np.zeros((2, 4), np.float16), name="cut", shard_over=4)
        whole = VariableFactory(lambda: np.zeros((2, 4)), popxl.float32, name="whole")
        facts = NamedVariableFactories(b=cut, a=whole)
        for made, shapes in (
            (reduce_replica_sharded_graph(facts), [(2,), (2,)]),
            (all_gather_replica_sharded_graph(facts), [(2, 4), (2, 4)]),
        ):
            graph, names = made
            assert names == ["a", "b"]
            assert [(t.shape, t.dtype) for t in graph.graph.inputs] == [
                ((2, 4), popxl.float32), ((2,), popxl.float16)
            ]  # fmt: skip
            assert graph.args.b.meta_shape == (2, 4)
            assert [t.shape for t in graph.graph.outputs] == shapes


# ---- groupings ----------------------------------------------------------------------------------
def test_link_domains_are_told_by_the_launcher(monkeypatch):
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        strided = ir.replica_grouping(stride=2)
        assert get_ild_replica_grouping(strided) is strided
        assert get_instance_replica_grouping() == ir.replica_grouping()
        assert get_ild_size_from_popdist() == 4
        monkeypatch.setenv("POPLAR_TARGET_OPTIONS", '{"ipuLinkDomainSize": 2}')
        assert get_ild_size_from_popdist() == 2
        assert get_ild_replica_grouping().groups == ((0, 1), (2, 3))
        assert is_cross_ild(ir.replica_grouping())
        monkeypatch.setenv("POPLAR_TARGET_OPTIONS", '{"ipuLinkDomainSize": 1}')
        with pytest.raises(ValueError, match="one link domain of 1"):
            get_ild_replica_grouping(strided)
        monkeypatch.setenv("POPLAR_TARGET_OPTIONS", "ipuLinkDomainSize=2")
        with pytest.raises(ValueError, match="POPLAR_TARGET_OPTIONS"):
            get_ild_size_from_popdist()
        monkeypatch.delenv("POPLAR_TARGET_OPTIONS")
        assert not is_cross_ild(strided)
        assert fill_none_group(None, strided) is strided
        assert fill_none_group(ir.replica_grouping(), strided) == ir.replica_grouping()


def test_at_most_64_replicas_are_one_link_domain_by_default():
    ir = popxl.Ir(replication=128)
    with ir.main_graph:
        assert get_ild_size_from_popdist() == 64


def test_groups_are_cut_at_instances(monkeypatch):
    monkeypatch.setenv("POPDIST_NUM_INSTANCES", "2")
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "8")
    ir = popxl.Ir(replication="popdist")
    with ir.main_graph:
        strided = ir.replica_grouping(stride=2)  # 0 2 4 6 | 1 3 5 7
        assert get_instance_replica_grouping(strided).groups == ((0, 2), (1, 3), (4, 6), (5, 7))
        assert is_cross_instance(strided)
        assert not is_cross_instance(ir.replica_grouping(group_size=4))
