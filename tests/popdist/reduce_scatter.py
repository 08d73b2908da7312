"""Reduce-scatters of a large array by two processes; run by test_reduce_scatter.

    python reduce_scatter.py ours|xla COUNT

Prints how many results of this process were wrong. The sums are of small integers, so they are
exact.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import popdist
import popxl
from popxl._devices.mesh import create_per_replica_sharding, replica_mesh
from popxl.ops import _collective

ELEMENTS, ARRAYS = 2**22, 4  # 16 MiB each


def main(how: str, count: int) -> None:
    """Reduce and scatter again and again, and compare."""
    mesh: Mesh = replica_mesh("cpu", 2, instances=2)
    group = popxl.Ir(replication=2).replica_grouping()
    index = popdist.getInstanceIndex()
    values = np.random.default_rng(0).integers(-9, 9, (ARRAYS, 2, ELEMENTS)).astype(np.float32)
    half = ELEMENTS // 2
    expected = values.sum(axis=1)[:, index * half :][:, :half]

    def local(array: np.ndarray) -> jax.Array:
        whole = np.concatenate(array)
        return jax.make_array_from_callback(
            whole.shape, create_per_replica_sharding(mesh), lambda i: whole[i]
        )

    def step(factor, *arrays):
        scatter = _collective.reduce_scatter
        if how == "xla":
            scatter = lambda x, group: lax.psum_scatter(x, "r", tiled=True)  # noqa: E731
        return [scatter(x * factor, group) for x in arrays]

    own = PartitionSpec(_collective.AXIS)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=own, out_specs=own, check_vma=False))
    arrays, wrong = [local(v) for v in values], 0
    for i in range(1, count + 1):
        results = run(local(np.full((2, 1), i, np.float32)), *arrays)
        for found, right in zip(results, expected, strict=True):
            wrong += not np.array_equal(found.addressable_shards[0].data, i * right)
    print(sum(popdist.all_gather_object(wrong)), flush=True)


if __name__ == "__main__":
    popdist.init()
    main(sys.argv[1], int(sys.argv[2]))
