"""What holds for every test: CPU, no network, no state from outside, fixed seeds."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.children import end_children
from tests.stores import address, s3_server  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from popxl._compile.executable_cache import SegmentCache as Cache
    from popxl._schedule.segment import Segment

# Set before anything imports jax or a Hugging Face library, which read them once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
# Workers of pytest share the processors; OpenMP's threads of torch would spin for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent
# Under nohup and in the background a process ignores these, and so do those that it starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["POPXL_CACHE_DIR"] = ""  # none: scripts would take the user's
os.environ.pop("POPART_CACHE_DIR", None)
# Compiling what a process imports takes longer than importing it. Where the environment, as that of
# a container, lets Python write no bytecode, tests have it in a folder of their own.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(ROOT.parent / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# What is compiled as for users, where a test does not say otherwise: the engine. Of the add-ons
# those tests say so whose bits or compiled text are at stake.
OPTIMISED = {"popxl", "popart", "popdist", "properties"}
COMPILE_QUICKLY = "jax_disable_most_optimizations"
QUICKER: dict[str, bool | int] = {
    "xla_cpu_parallel_codegen_split_count": 1,  # each part is a module of LLVM's
}
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later ones have only new ones
    QUICKER["xla_cpu_use_fusion_emitters"] = False  # the old ones; casts to fnuz are wrong
KNOWN = 200  # executables that are kept for other tests; each takes some of a process's mappings
MAX_MAPPINGS = 30_000  # Linux gives a process 65,530; where they end, XLA's compiler crashes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose what XLA optimises. The application's tests judge its programs, which are the same
    where XLA optimises little; some of them, marked `optimised` or slow, run what users run."""
    room = item.path.relative_to(ROOT).parts[0]
    marks = {mark.name for mark in item.iter_markers()}
    is_optimised = "optimised" in marks or ("slow" in marks and "quickly" not in marks)
    compile_quickly(room not in OPTIMISED and not is_optimised)


def compile_quickly(quickly: bool) -> None:
    """Choose it for this process and those that it starts."""
    import jax

    from popxl._devices import cpu

    jax.config.update(COMPILE_QUICKLY, quickly)
    os.environ[COMPILE_QUICKLY.upper()] = str(int(quickly))
    os.environ["XLA_FLAGS"] = xla_flags()
    for name, value in QUICKER.items():
        cpu.COMPILER_OPTIONS.pop(name, None)
        if quickly:
            cpu.COMPILER_OPTIONS[name] = value
            os.environ["XLA_FLAGS"] += f" --{name}={str(value).lower()}"


@cache
def xla_flags() -> str:
    """The flags of this process, which XLA reads once: what is set later is for others."""
    from jaxlib import xla_client

    from popxl._devices.mesh import prepare_environment

    prepare_environment()
    xla_client.CompileOptions()
    return os.environ["XLA_FLAGS"]


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start the global generators anew for each test; tests' own generators name their seed."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for libraries that draw from it


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """End the processes that a test leaves running."""
    yield
    end_children()


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Keep what earlier files left, above all JAX's caches, out of the garbage collector's way:
    walking them for each collection takes a tenth of the time of all tests."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def executables(tmp_path_factory) -> Path:
    """A folder of executables that tests may share, those of other workers too: a program that
    several of them run is compiled once. Name it in `POPXL_CACHE_DIR`, or use `cached`."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executables"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def cached(executables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test take executables from that folder: where several of its programs are alike."""
    monkeypatch.setenv("POPXL_CACHE_DIR", str(executables))


@pytest.fixture(autouse=True, scope="session")
def compiled_once() -> Iterator[dict[tuple[object, ...], object]]:
    """Compile a segment of the application's once in a process, whichever tests have it."""
    from popxl._compile.executable_cache import SegmentCache
    from popxl._devices import cpu

    compile_anew, known = SegmentCache._compile, dict[tuple[object, ...], object]()
    changing = threading.Lock()  # a program compiles its segments in several threads

    def compile_(cache: Cache, segment: Segment) -> object:
        if os.environ[COMPILE_QUICKLY.upper()] == "0":  # tests of the engine look at what it does
            return compile_anew(cache, segment)
        key = cache.key(segment), cpu.backend_epoch()
        if (found := known.get(key)) is not None:
            for what in ("traces", "compiles"):
                cache.increment_counter(what)
            return found
        made = compile_anew(cache, segment)
        with changing:
            known[key] = made
            while len(known) > KNOWN:
                del known[next(iter(known))]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentCache, "_compile", compile_)
        yield known


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings(compiled_once: dict[tuple[object, ...], object]) -> Iterator[None]:
    """Free what is compiled before the process has no memory mappings left."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MAX_MAPPINGS:
        import jax

        compiled_once.clear()
        jax.clear_caches()
        gc.unfreeze()  # what `small_heap` left out
        gc.collect()
