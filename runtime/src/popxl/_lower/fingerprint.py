"""What determines a compiled program, as one digest: the key of the executable cache.

The text form of an Ir is for people: it shortens constants and leaves out what ops mean. Here every
fact that reaches the compiler is written down, and none that does not: no ids of objects, no source
locations, no values of variables or of constants that are arguments of the program. A fact that
cannot be written down makes the program uncacheable; it never makes two programs look the same.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import numpy as np

from popxl import dtypes
from popxl._core.op import Op
from popxl._core.opdef import registry
from popxl._core.options import MEANINGFUL
from popxl.graph import Graph
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import Stream
from popxl.tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from popxl._core.opdef import OpDef
    from popxl._lower.program import Program

_OURS = ("popxl", "popxl_addons")
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_PATH_OPTIONS = {"cachePath", "dotChecks", "enableEngineCaching", "logDir"}
# Custom calls that every process can run: XLA's own, and kernels that travel in the executable.
_BUILTIN_CALLS = re.compile(r"Sharding$|SPMD|TopK$|__gpu\$|tpu_custom_call$")


class Uncacheable(Exception):
    """The program has a part whose meaning cannot be written down; the message says which."""


def program_key(program: Program) -> str:
    """SHA-256 of all that determines the executable of `program`, in hexadecimal.

    Raises:
        Uncacheable: the program acts on the outside world, or an op or attribute has no
            stable description.
    """
    digest = hashlib.sha256()
    for line in (*_machine(program), *program_lines(program)):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


# ---- the machine and the software ---------------------------------------------------------------
def _machine(program: Program) -> Iterator[str]:
    devices = list(program.mesh.devices.flat)
    client = devices[0].client
    yield f"sources {_source_digest()}"
    yield f"jax {jax.__version__} jaxlib {jaxlib.__version__}"
    yield f"platform {program.platform} {client.platform_version}"
    yield f"devices {[d.id for d in devices]}"
    yield f"kinds {sorted({d.device_kind for d in devices})}"
    yield f"process {jax.process_index()} of {jax.process_count()}"
    yield f"processor {_processor()}"
    yield f"switches {sorted(program.switches.items())}"
    yield from (f"{name}={os.environ.get(name, '')}" for name in _ENVIRONMENT)
    yield from (f"{name}={getattr(jax.config, name, None)}" for name in _JAX_SETTINGS)


@cache
def _processor() -> str:
    """Model and instruction sets of the CPU; XLA compiles for exactly these."""
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    found = {name.strip(): value.strip() for name, _, value in pairs}
    return f"{platform.machine()} {[found.get(name, '') for name in names]}"


@cache
def _source_digest() -> str:
    """Digest of the source files that give ops their meaning."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in _OURS:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- the program --------------------------------------------------------------------------------
def program_lines(program: Program) -> Iterator[str]:
    """The program as lines of text; equal lines mean equal programs on one machine."""
    if program.effects.impure:
        raise Uncacheable("it calls back to Python (print_tensor)")
    ir = program.ir
    options = ir._pb_ir.getSessionOptions()
    yield f"replicas={ir.replication_factor} transfers={ir.num_host_transfers}"
    for name in sorted(MEANINGFUL - _PATH_OPTIONS):
        yield f"option {name}={getattr(options, name)}"
    yield f"layout {program.layout}"
    for name, part in zip(("changing", "fixed"), program.argument_specs, strict=False):
        yield f"{name} {sorted(part.variables)} {sorted(part.buffers)}"
    for b in program.buffers:
        yield f"buffer {b!r}"
    for s in (*program.h2d, *program.d2h):
        yield f"stream {s!r}"
    arguments = set(program.constants)
    for graph in ir._graphs:
        yield from _graph_lines(graph, arguments, program.platform)


def _graph_lines(graph: Graph, arguments: set[Any], target: str) -> Iterator[str]:
    yield f"graph {graph.id}"
    for t in graph._inputs:
        yield f"input {_tensor(t)} {_spec(t.spec)} {'&' if t._by_ref else ''}"
    for t in (*graph.variables, *graph.constants):
        value = "argument" if t in arguments else _array(t._data) if t in graph.constants else ""
        yield f"data {_tensor(t)} {_spec(t.spec)} {value}"
    for op in graph._ops:
        yield from _op_lines(op, target)
    yield f"return {[_tensor(t) for t in graph._outputs]}"


def _op_lines(op: Op, target: str) -> Iterator[str]:
    yield _op(op)
    yield from _user_defined(op, target)


def _op(op: Op) -> str:
    ins = [_tensor(t) for t in op.inputs]
    outs = [f"{_tensor(t)} {_spec(t.spec)}" for t in op.outputs]
    try:
        attrs = ", ".join(f"{k}={_value(v)}" for k, v in sorted(op.attrs.items()))
    except Uncacheable as error:
        raise Uncacheable(f"{op.name} at {op.location} has {error}") from None
    how = f"inplace={op.inplace} view={op.view} modified={sorted(op.site_modified)}"
    return f"op {op.defn.name} {ins} -> {outs} {{{attrs}}} {how}"


def _tensor(t: Tensor) -> str:
    return t.id


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype.name}{list(spec.shape)}{list(spec.meta_shape)}"


def _array(x: np.ndarray) -> str:
    data = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    return f"{x.dtype.str}{list(x.shape)}:{data}"


def _value(value: Any) -> str:
    """A text that equal attributes share and different ones do not."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, Enum)):
        return f"{type(value).__name__}:{value!r}"
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    raise Uncacheable(f"an attribute of type {type(value).__name__}")


def _sequence(value: Any) -> str:
    return f"{type(value).__name__}({', '.join(map(_value, value))})"


def _mapping(value: Any) -> str:
    return f"dict({', '.join(f'{_value(k)}: {_value(v)}' for k, v in value.items())})"


_WRITERS: tuple[tuple[type, Any], ...] = (
    (TensorSpec, _spec),  # before Mapping, which it is
    (tuple, _sequence),
    (list, _sequence),
    (dict, _mapping),
    (dtypes.dtype, lambda v: f"dtype:{v.name}"),
    (np.dtype, lambda v: f"np.dtype:{v}"),
    (np.generic, lambda v: f"np:{_array(np.asarray(v))}"),
    (np.ndarray, lambda v: f"np:{_array(v)}"),
    (Graph, lambda v: f"graph:{v.id}"),
    (Tensor, lambda v: f"tensor:{v.id}"),
    (ReplicaGrouping, lambda v: f"groups:{v.assignment}"),
    (RemoteBuffer, lambda v: f"buffer:{v.remote_buffer_id}"),
    (Stream, lambda v: f"stream:{v.tensor_id}"),
    (Op, _op),
)


# ---- ops that users define ----------------------------------------------------------------------
def _is_ours(defn: OpDef) -> bool:
    return defn.home.partition(".")[0] in _OURS


def _user_defined(op: Op, target: str) -> Iterator[str]:
    """What an op of the user's means: the StableHLO it lowers to, and that its gradient does."""
    defn = registry()[op.attrs["of"]] if op.defn.name == "vjp" else op.defn
    if not _is_ours(defn):
        yield _meaning(op, target)


def _meaning(op: Op, target: str) -> str:
    if op.defn.lower is None or op.view:
        raise Uncacheable(f"{op.name} at {op.location} is a structural op or view of the user's")
    specs = [jax.ShapeDtypeStruct(t.shape, t.dtype.as_jax()) for t in op.inputs]
    try:
        traced = jax.jit(partial(op.defn.lower, **op.attrs)).trace(*specs)
        text = traced.lower(lowering_platforms=("cuda" if target == "gpu" else target,)).as_text()
    except Exception as error:  # whatever the user's function raises when it stands alone
        raise Uncacheable(f"{op.name} at {op.location} cannot be lowered alone") from error
    for call in re.findall(r"custom_call @(\w+|\"[^\"]+\")", text):
        if not _BUILTIN_CALLS.match(call.strip('"')):
            raise Uncacheable(f"{op.name} at {op.location} calls {call}, which lives outside XLA")
    return f"meaning {hashlib.sha256(text.encode()).hexdigest()}"
