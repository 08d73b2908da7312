"""Executables that are launched from several threads by turns, and the heap."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl._compile.platforms import get_platform
from popxl._devices import cpu
from popxl.errors import VersionError

LARGE = cpu._WORTHWHILE


@pytest.fixture(scope="module")
def long_and_short():
    """Two executables that take one core each, and an argument for each."""
    arrays = [np.random.default_rng(0).normal(size=n).astype(np.float32) for n in (2**21, 2**13)]
    given = list(map(jnp.asarray, arrays))
    return [(jax.jit(jnp.sort).lower(x).compile(), x) for x in given]


def is_overtaken(launch, long_and_short) -> bool:
    """True if the short executable, launched last, is done before the long one."""
    (long, x), (short, y) = long_and_short
    first = launch(long, [x])
    launch(short, [y]).block_until_ready()
    overtaken = not first.is_ready()
    first.block_until_ready()
    return overtaken


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core runs one executable at a time")
def test_executables_launched_by_turns_run_at_a_time(long_and_short):
    launch = cpu.CpuLauncher(1, 1)
    assert is_overtaken(lambda e, given: launch(e, given, LARGE), long_and_short)


def test_what_one_thread_launches_does_not(long_and_short):
    """XLA runs it in turn; otherwise launching from several threads would be of no use."""
    assert not is_overtaken(lambda e, given: e(*given), long_and_short)


def test_small_executables_are_launched_by_the_caller(monkeypatch):
    monkeypatch.setattr(cpu, "_launch_threads", lambda: pytest.fail("another thread"))
    launch = cpu.CpuLauncher(1, 1)
    for _ in range(4):
        assert launch(threading.get_ident, [], LARGE - 1) == threading.get_ident()


def test_an_error_reaches_the_caller_and_the_next_launch_is_right():
    def fail():
        raise ValueError("wrong shape")

    launch = cpu.CpuLauncher(1, 1)
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong shape"):
            launch(fail, [], LARGE)
    assert [launch(lambda: (1,), [], LARGE) for _ in range(3)] == [(1,)] * 3


def test_an_array_without_elements_has_no_bytes():
    assert cpu.memory_view(jnp.zeros((0, 3))).shape == (0,)


def test_memory_given_away_is_overwritten_after_everybody_has_read_it():
    slow = jax.jit(lambda x: jnp.sort(-x)[0])
    increase = jax.jit(lambda x: x + 1, donate_argnums=0)
    launch, count = cpu.CpuLauncher(1, 1), 200_000
    x = jnp.arange(count, dtype=jnp.float32)
    found, memory = [], set()
    for _ in range(30):
        found.append(launch(slow, [x], LARGE))
        x = launch(increase, [x], LARGE)
        memory.add(x.unsafe_buffer_pointer())
    assert len(memory) == 1
    assert [float(f) for f in found] == [-(count - 1 + i) for i in range(30)]


HOLES = """
import ctypes
from popxl._devices import cpu

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

blocks = [libc.malloc(2**14) for _ in range(10_000)]
for block in blocks:
    ctypes.memset(block, 1, 2**14)
for block in blocks[:-1]:
    libc.free(block)
before = resident()
cpu.return_free_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_holes_of_the_heap_go_back_to_the_system():
    ran = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0.9 * 10_000 * 2**14


# ---- versions of JAX ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("version", "is_right"),
    [("0.10.2", True), ("0.11.2", True), ("0.11.3", False), ("0.12.0", False)],
)
def test_a_version_of_jax_that_is_too_new_is_refused_on_a_cpu(version, is_right, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(jax, "__version_info__", tuple(map(int, version.split("."))))
    for elsewhere in ("gpu", "tpu"):
        get_platform(elsewhere).check_version()
    if is_right:
        popxl.Session(popxl.Ir())
    else:
        message = rf"JAX {version} is installed.*on a CPU.*: install jax<=0.11.2, or run on a GPU"
        with pytest.raises(VersionError, match=message):
            popxl.Session(popxl.Ir())
