"""Stochastic rounding of 16-bit variables: what is drawn, and that copies stay copies."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl._compile.cache_key import segment_key
from popxl._compile.segment_function import lower_segment
from popxl._devices.mesh import replica_mesh
from popxl._run.program import Program
from popxl.ops.var_updates._rounding import random_uint16, round_to_neighbor
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")
HALF = [np.float16, ml_dtypes.bfloat16]
NAMES = ["float16", "bfloat16"]


# ---- one rounding -------------------------------------------------------------------------------
def all_finite(dtype) -> np.ndarray:
    """All finite values of a 16-bit dtype in order, without -0, in float64."""
    with np.errstate(invalid="ignore"):
        values = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def neighbours(values: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """The values of the dtype next below (or equal) and next above, by a search in all of them."""
    known = all_finite(dtype)
    at = np.searchsorted(known, values, side="right") - 1
    return known[at], known[np.minimum(at + 1, len(known) - 1)]


def in_between(dtype) -> np.ndarray:
    """Float32 between neighbours of all sizes, subnormal ones and the largest among them."""
    rng = np.random.default_rng(0)
    known = all_finite(dtype)
    # XLA on CPU takes float32's own subnormal numbers for 0, so they are left out.
    known = known[(np.abs(known) >= 2.0**-125) | (known == 0)]
    low = rng.integers(0, len(known) - 1, 500)
    low[:6] = 0, len(known) - 2, *(np.searchsorted(known, 0) + np.arange(-2, 2))
    low = low[known[low] * known[low + 1] != 0] if dtype is not np.float16 else low
    part = rng.random(len(low))
    return (known[low] * (1 - part) + known[low + 1] * part).astype(np.float32)


@partial(jax.jit, static_argnames="dtype")
def rounded(values: jax.Array, dtype, seed: jax.Array) -> jax.Array:
    own = jnp.zeros(values.shape, jnp.uint16)
    return round_to_neighbor(values, dtype, random_uint16(seed, own, 0))


def draw(values: np.ndarray, dtype, count: int, seed: int = 0) -> np.ndarray:
    """`count` roundings of each value, (count, values), float64."""
    many = np.broadcast_to(values, (count, *values.shape))
    return np.asarray(rounded(many, dtype, np.array([seed, 1], np.uint32))).astype(np.float64)


@pytest.mark.parametrize("dtype", HALF, ids=NAMES)
def test_the_mean_of_many_is_the_value(dtype):
    """Only the two neighbours come, with a mean within 5 standard errors for each of all values."""
    values, count = in_between(dtype), 4096
    found = draw(values, dtype, count)
    low, high = neighbours(values.astype(np.float64), dtype)
    assert ((found == low) | (found == high)).all()
    up = (values - low) / (high - low)
    error = np.abs((found == high).mean(axis=0) - up)
    assert (error <= 5 * np.sqrt(up * (1 - up) / count) + 2.0**-16).all()
    assert 0.05 < (up < 0.1).mean() < 0.2, "small and large parts are both tried"


@pytest.mark.parametrize("dtype", HALF, ids=NAMES)
def test_values_of_the_type_stay(dtype):
    patterns = np.arange(2**16, dtype=np.uint16)
    patterns = patterns.reshape(1, -1)
    values = patterns.view(dtype)
    exact = values.astype(np.float32)
    normal = (np.abs(exact) >= 2.0**-126) | (exact == 0)  # see `in_between`
    for seed in range(4):
        found = np.asarray(rounded(exact, dtype, np.array([seed, 2], np.uint32)))
        numbers = normal & ~np.isnan(exact)
        np.testing.assert_array_equal(found.view(np.uint16)[numbers], patterns[numbers])
        assert np.isnan(found[np.isnan(exact)].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", HALF, ids=NAMES)
def test_beyond_the_largest_value_as_to_nearest(dtype):
    largest = float(all_finite(dtype)[-1])
    step = largest - float(all_finite(dtype)[-2])
    beyond = np.array([largest + step * 0.4, largest + step * 0.6, np.inf], np.float32)
    values = np.concatenate([beyond, -beyond])
    found = draw(values, dtype, 64)
    assert (found == [largest, np.inf, np.inf, -largest, -np.inf, -np.inf]).all()


def halves(seed: tuple[int, int], number: int, own: int = 0, n: int = 2**20) -> np.ndarray:
    """The bits that are drawn for `n` elements with the same old value."""
    key = np.array(seed, np.uint32)
    return np.asarray(random_uint16(key, jnp.full(n, own, jnp.uint16), number))


@pytest.mark.parametrize("old", [0, 0x3F80, None], ids=["zeros", "ones", "values"])
def test_bits_are_evenly_distributed(old):
    """Chi-squared of bytes, and of neighbours' joined high nibbles, within 5 standard deviations;
    for old values that are equal, and that follow the element's place."""
    n = 2**20
    own = np.arange(n).astype(np.uint16) if old is None else np.full(n, old, np.uint16)
    x = np.asarray(random_uint16(np.array([3, 0], np.uint32), own, 7))
    pairs = (x[:-1:2] >> 12 << 4) | (x[1::2] >> 12)
    for values in (x >> 8, x & 0xFF, pairs):
        counts = np.bincount(values, minlength=256)
        squares = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(squares - 255) < 5 * np.sqrt(2 * 255)


def test_bits_of_other_seeds_updates_and_old_values_are_unrelated():
    """One changed bit of seed, index or old value changes half of the random bits, without
    correlation."""
    first = halves((5, 0), 0)
    others = [halves((4, 0), 0), halves((5, 1), 0), halves((5, 0), 1), halves((5, 0), 0, own=1)]
    shifted = [np.roll(first, places) for places in (1, 2, 32, 4096)]
    for other in (*others, *shifted):
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / np.sqrt(first.size)
        changed = np.bitwise_count(first ^ other).mean() / 16
        assert abs(changed - 0.5) < 5 * 0.5 / np.sqrt(16 * first.size)


def test_an_update_takes_no_memory_for_what_is_drawn():
    """A table is updated where it is: nothing of its size is made besides."""
    ir = popxl.Ir()
    addons.enable_stochastic_rounding(ir)
    with ir.main_graph:
        tables = [popxl.variable(np.zeros((512, 64)), popxl.bfloat16) for _ in range(3)]
        x = popxl.constant(np.full((512, 64), 2.0**-9, np.float32))
        for table in tables:
            ops.var_updates.accumulate_(table, x)
    costs = popxl.plan.trace_program(ir, "gpu 9.0").segment_costs
    assert sum(cost.temporaries for cost in costs.values()) < 1024


# ---- in programs --------------------------------------------------------------------------------
def counters(enabled: bool = True, replicas: int = 1, n: int = 4096, dtype=popxl.bfloat16):
    """A program that adds a quarter of a step of bfloat16 twice in each of 3 iterations."""
    ir = popxl.Ir(replication=replicas)
    addons.enable_stochastic_rounding(ir, enabled)
    with ir.main_graph:
        a, b = (popxl.variable(np.ones(n), dtype, name=name) for name in "ab")
        quarter = popxl.variable(np.full(n, 2.0**-9, np.float32))

        def twice(a: popxl.TensorByRef, b: popxl.TensorByRef, x: popxl.Tensor) -> None:
            ops.var_updates.accumulate_(a, x)
            ops.var_updates.accumulate_(b, x, 1.0)

        ops.repeat(ir.create_graph(twice, a, b, quarter), 3, a, b, quarter)
    return ir, a, b


def ups(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float64) - 1) * 2**7


def test_small_updates_are_not_lost():
    """Rounding to nearest loses every one of them; at random, their sum is right on average."""
    for enabled, expected in ((False, 0.0), (True, 1.5)):  # 6 quarters, in steps of bfloat16
        ir, a, b = counters(enabled)
        with popxl.Session(ir) as session:
            for _ in range(2):
                session.run()
            found = [ups(session.get_tensor_data(t)) for t in (a, b)]
        for values in found:
            assert abs(values.mean() - expected) < 5 * np.sqrt(6 * 0.1875 / values.size)
        if enabled:
            assert {0, 1, 2, 3} <= set(found[0]) <= set(range(7))
            assert abs(np.corrcoef(*found)[0, 1]) < 5 / np.sqrt(4096)
            # Six independent draws: the variance tells whether iterations draw anew.
            assert found[0].var() == pytest.approx(6 * 0.1875, rel=0.1)


def test_runs_are_functions_of_the_seed_and_their_number():
    def run(seed: int | None, times: int = 1) -> np.ndarray:
        ir, a, _ = counters()
        with popxl.Session(ir) as session:
            if seed is not None:
                addons.seed_stochastic_rounding(session, seed)
            for _ in range(times):
                session.run()
            return session.get_tensor_data(a).astype(np.float32)

    np.testing.assert_array_equal(run(5), run(5))
    np.testing.assert_array_equal(run(None), run(0))
    assert (run(5) != run(6)).mean() > 0.3
    twice = 2 * (run(5).astype(np.float64) - 1) + 1
    assert (run(5, 2) != twice).mean() > 0.3, "the second run rounds as the first one did"


def test_what_is_no_seed():
    session = popxl.Session(counters()[0])
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=r"must be in \[0, 2\*\*64\)"):
            addons.seed_stochastic_rounding(session, seed)


def test_programs_without_it_are_as_before():
    """No argument, no random bits; so too with the option where no 16-bit variable is updated."""
    plain, enabled = (Program(counters(e)[0], replica_mesh("cpu", 1)) for e in (False, True))
    wide = Program(counters(dtype=popxl.float32)[0], replica_mesh("cpu", 1))

    def lowered(program: Program) -> str:
        (segment,) = program.schedule.segments
        return lower_segment(segment, program.mesh, program.specs_of(segment)[0]).as_text()

    keys = []
    for program in (plain, wide, enabled):
        (segment,) = program.schedule.segments
        given = len(program.specs_of(segment)[0]) - len(segment.args)
        assert given == (2 if program is enabled else 0)  # the seed and a number
        assert lowered(program).count("rng_bit_generator") == (2 if program is enabled else 0)
        keys.append(segment_key(program, segment))
    assert len(set(keys)) == 3


def test_an_executable_from_the_cache_rounds_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    found = []
    for from_cache in (False, True):
        ir, a, _ = counters()
        with popxl.Session(ir) as session:
            assert session.startup_stats.from_cache is from_cache
            session.run()
            found.append(session.get_tensor_data(a).astype(np.float32))
    np.testing.assert_array_equal(*found)


def test_rounding_to_nearest_loses_a_training_that_random_rounding_follows():
    """Descent on (w - 1)² / 2 from 0.5, by steps of 2^-10 of the gradient."""
    n, steps, rate = 512, 2000, 2.0**-10
    exact = 1 - 0.5 * (1 - rate) ** steps
    ends = {}
    for enabled in (False, True):
        ir = popxl.Ir()
        addons.enable_stochastic_rounding(ir, enabled)
        with ir.main_graph:
            w = popxl.variable(np.full(n, 0.5), popxl.bfloat16)

            def descend(w: popxl.TensorByRef) -> None:
                gradient = ops.cast(w, popxl.float32) - 1.0
                ops.var_updates.accumulate_(w, gradient, -rate)

            ops.repeat(ir.create_graph(descend, w), steps, w)
        with popxl.Session(ir) as session:
            session.run()
            ends[enabled] = session.get_tensor_data(w).astype(np.float64)
    assert (ends[False] == 0.5).all()
    # Each step adds at most a variance of step²/4; the pull towards 1 forgets it at rate 2 * rate.
    spread = 2.0**-8 / 2 / np.sqrt(2 * rate)
    assert abs(ends[True].mean() - exact) < 5 * spread / np.sqrt(n)
    assert ends[True].std() < spread


# ---- replicas -----------------------------------------------------------------------------------
def per_replica(session: popxl.Session, key: object) -> np.ndarray:
    """Values of a variable or buffer on each replica, (replicas, ...), as float32."""
    assert session._state is not None
    if isinstance(key, popxl.RemoteBuffer):
        array = np.asarray(session._state.entries[key].array(0))
    else:
        array = np.asarray(session._state.variables[key])
    return array.reshape(session.ir.replication_factor, -1).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2, slow(4)])
def test_copies_stay_equal_and_shards_round_on_their_own(shards):
    """Two groups of four replicas; each group's variable is cut over `shards` of them."""
    replicas, n = 8, 4096
    ir = popxl.Ir(replication=replicas)
    addons.enable_stochastic_rounding(ir)
    with ir.main_graph:
        group = ir.replica_grouping(group_size=4)
        data = np.random.default_rng(0).uniform(1, 1.9, (2, n))
        if shards == 1:
            v = popxl.variable(data, popxl.bfloat16, replica_grouping=group)
            shard, key = v, v
        else:
            buffer = popxl.replica_sharded_buffer((n,), popxl.bfloat16, shard_over=shards)
            popxl.remote_replica_sharded_variable(
                data, buffer, 0, popxl.bfloat16, replica_grouping=group
            )
            shard, key = ops.remote_load(buffer, 0), buffer
        x = popxl.constant(np.full(n // shards, 2.0**-9, np.float32))
        for _ in range(3):
            ops.var_updates.accumulate_(shard, x)
        if shards > 1:
            ops.remote_store(buffer, 0, shard)
    with popxl.Session(ir) as session:
        before = per_replica(session, key)
        session.run()
        after = per_replica(session, key)
    moved = after - before
    assert set(np.unique(moved * 2**7)) == {0, 1, 2, 3}
    alike = 0
    for one in range(replicas):
        for other in range(one):
            if np.array_equal(before[one], before[other]):
                alike += 1
                np.testing.assert_array_equal(after[one], after[other])
            else:
                related = np.corrcoef(moved[one], moved[other])[0, 1]
                assert abs(related) < 5 / np.sqrt(n // shards)
    assert alike == {1: 12, 2: 4, 4: 0}[shards]


def test_branches_that_replicas_take_differently_leave_copies_equal():
    """Replica 0 rounds more often than replica 1, and yet they round alike afterwards."""
    ir = popxl.Ir(replication=2)
    addons.enable_stochastic_rounding(ir)
    with ir.main_graph:
        alone = ir.replica_grouping(group_size=1)
        which = popxl.variable(np.array([True, False]), popxl.bool, replica_grouping=alone)
        own = popxl.variable(np.ones((2, 256)), popxl.bfloat16, replica_grouping=alone)
        shared = popxl.variable(np.ones(256), popxl.bfloat16, name="shared")
        x = popxl.variable(np.full(256, 2.0**-9, np.float32))

        def update(t: popxl.TensorByRef, x: popxl.Tensor) -> None:
            ops.var_updates.accumulate_(t, x)
            ops.var_updates.accumulate_(t, x)

        def nothing(t: popxl.TensorByRef, x: popxl.Tensor) -> None:
            pass

        branches = [ir.create_graph(f, own, x) for f in (update, nothing)]
        ops.conditional(which, *branches, [own, x], [own, x])
        ops.var_updates.accumulate_(shared, x)
    with popxl.Session(ir) as session:
        session.run()
        first, second = per_replica(session, shared)
        changed, unchanged = per_replica(session, own)
    np.testing.assert_array_equal(first, second)
    assert set(first) == {1, 1 + 2.0**-7}
    assert (unchanged == 1).all()
    assert not (changed == 1).all()
