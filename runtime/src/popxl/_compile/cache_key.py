"""Cache key of a compiled segment: a hash of everything that determines the executable.

The printed form of an Ir shortens constants and omits the meaning of ops. The key includes every
fact that reaches the compiler and no other: no object ids, no source locations, no values of
variables or of constants that are arguments. A fact that cannot be described makes the program
uncacheable; two different programs never have equal keys.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import numpy as np

from popxl import dtypes
from popxl._compat.session_options import SUPPORTED_OPTIONS
from popxl._ir.op_registry import registry
from popxl._schedule.segment import Segment, donated_argnums, program_context
from popxl.graph import Graph
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import Stream
from popxl.tensor import Constant, Tensor, TensorSpec

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node, Value
    from popxl._compile.compile_target import CompileTarget
    from popxl._ir.op import Op
    from popxl._ir.op_registry import OpDef
    from popxl.ir import Ir

_OWN_PACKAGES = ("popxl", "popxl_addons")
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_PATH_OPTIONS = {"cachePath", "dotChecks", "enableEngineCaching", "logDir"}
# Custom calls that every process can run: XLA's own, and kernels inside the executable.
_BUILTIN_CALLS = re.compile(r"Sharding$|SPMD|TopK$|__gpu\$|tpu_custom_call$")


class UncacheableError(Exception):
    """Part of the program has no stable text form to hash; the message names it."""


def segment_key(program: CompileTarget, segment: Segment) -> str:
    """Returns the SHA-256 (hex) of everything that determines a segment's executable.

    Equal segments have equal keys.

    Raises:
        UncacheableError: the segment acts on the outside world, or an op or attribute has no stable
            description.
    """
    digest = hashlib.sha256()
    platform = program.platform.name
    for line in (*_environment_lines(program), *segment_lines(program.ir, platform, segment)):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


# ---- the machine and the software ---------------------------------------------------------------
def _environment_lines(program: CompileTarget) -> Iterator[str]:
    devices = list(program.mesh.devices.flat)
    client = devices[0].client
    yield f"sources {_source_digest()}"
    yield f"jax {jax.__version__} jaxlib {jaxlib.__version__}"
    yield f"platform {program.platform.name} {client.platform_version}"
    yield f"devices {[d.id for d in devices]}"
    yield f"kinds {sorted({d.device_kind for d in devices})}"
    yield f"process {jax.process_index()} of {jax.process_count()}"
    yield f"processor {_cpu_description()}"
    yield f"switches {sorted(_platform_option_flags(program.platform.compiler_options))}"
    yield from (f"{name}={os.environ.get(name, '')}" for name in _ENVIRONMENT)
    yield from jax_settings()


def _platform_option_flags(compiler_options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the platform's compiler options, without those that XLA_FLAGS sets equally."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return (s for n, v in compiler_options.items() if (s := f"--{n}={str(v).lower()}") not in flags)


def jax_settings() -> Iterator[str]:
    """Yields the JAX settings that change tracing or compilation."""
    values = jax.config.values  # a new dict each time
    yield from (f"{name}={values.get(name)}" for name in _JAX_SETTINGS)


@cache
def _cpu_description() -> str:
    """Returns the model and instruction sets of the host CPU, which XLA compiles for."""
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return f"{platform.machine()} {[fields.get(name, '') for name in names]}"


@cache
def _source_digest() -> str:
    """Returns a hash of the runtime's source files, which define the ops."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in _OWN_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- the segment --------------------------------------------------------------------------------
def segment_lines(
    ir: Ir, platform: str, segment: Segment, with_labels: bool = False
) -> Iterator[str]:
    """Yields a segment as lines of text; equal lines mean equal segments on one machine.

    Args:
        with_labels: equal segments also belong to the same parts of a program (`popxl.plan.part`).
    """
    if segment.effects.impure:
        raise UncacheableError("it calls back to Python (print_tensor)")
    context = program_context(segment)
    text = _SegmentWriter(platform, context.watched, with_labels)
    options = ir._pb_ir.getSessionOptions()
    yield f"replicas={context.replicas}"
    for name in sorted(SUPPORTED_OPTIONS - _PATH_OPTIONS):
        yield f"option {name}={getattr(options, name)}"
    for i, value in enumerate(segment.args):
        yield f"argument {text.value_text(value)} {'number' if i in segment.scalar_args else ''}"
    if segment.streams:
        yield f"transfers={context.transfers}"
    yield from (f"stream {text.stream_text(s)}" for s in segment.streams)
    yield f"sinks {[text.stream_text(s) for s in segment.output_streams]}"
    yield from (f"constant {text.tensor_text(c)} {_spec_text(c.spec)}" for c in segment.constants)
    yield from map(text.node_text, segment.nodes)
    yield f"checks {[context.checks[op] for op in segment.effects.checks if op in context.checks]}"
    yield f"return {text.value_texts(segment.results)}"
    yield f"donated {donated_argnums(segment)} infinite {context.infinite}"
    yield from text.graph_texts()


class _SegmentWriter:
    """Writes nodes as text, with names that depend on the segment alone."""

    def __init__(self, target: str, watched: Mapping[Op, int], with_labels: bool = False) -> None:
        self._target, self._watched, self._with_labels = target, watched, with_labels
        self._numbers: dict[Any, int] = {}
        self._graphs: dict[FunctionalGraph, int] = {}

    def stream_text(self, s: Stream) -> str:
        return f"{self._stable_number('stream', s)} {type(s).__name__} {_spec_text(s.spec)}"

    def _stable_number(self, kind: str, obj: Any) -> int:
        return self._numbers.setdefault((kind, obj), len(self._numbers))

    def tensor_text(self, t: Tensor) -> str:
        if isinstance(t, Constant) and t._is_executable_argument:
            return f"%{self._stable_number('content', t._content_key)}"
        return f"%{self._stable_number('tensor', t)}"

    def value_text(self, v: Value) -> str:
        t = v.tensor
        if v.node is None and isinstance(t, Constant):
            return f"{self.tensor_text(t)} {_spec_text(t.spec)} {self._data_text(t)}"
        return f"%{self._stable_number('value', v)} {_spec_text(t.spec)}"

    def value_texts(self, values: Iterable[Value]) -> list[str]:
        return list(map(self.value_text, values))

    @staticmethod
    def _data_text(t: Constant) -> str:
        return "argument" if t._is_executable_argument else _hash_array(t._data)

    def node_text(self, node: Node) -> str:
        ins, outs = self.value_texts(node.inputs), self.value_texts(node.outputs)
        runs = [
            f"{self._graph_text(r.graph)} {r.inputs} {r.outputs} {r.carried} {r.count} {r.kind}"
            for r in node.regions
        ]
        meaning = "" if node.op is None else self._lowering_text(node.op)
        watched = "" if node.op is None else self._watched.get(node.op, "")
        part = f" of {node.part!r}" if self._with_labels else ""
        return f"{node.kind} {meaning} {ins} -> {outs} {runs} {watched}{part}"

    def _lowering_text(self, op: Op) -> str:
        try:
            pairs = sorted(op.attrs.items())
            attrs = ", ".join(f"{k}={self.attribute_text(v)}" for k, v in pairs)
        except UncacheableError as error:
            raise UncacheableError(f"{op.name} at {op.location} has {error}") from None
        return f"{op.defn.name} {{{attrs}}} {' '.join(_user_op_lines(op, self._target))}"

    def _graph_text(self, graph: FunctionalGraph) -> str:
        return f"graph:{self._graphs.setdefault(graph, len(self._graphs))}"

    def graph_texts(self) -> Iterator[str]:
        """Yields the text of all graphs that the segment runs, nested ones included."""
        done = 0
        while done < len(self._graphs):
            graph = list(self._graphs)[done]
            yield f"graph {done} {self.value_texts(graph.inputs)}"
            yield from map(self.node_text, graph.nodes)
            yield f"return {self.value_texts(graph.outputs)}"
            done += 1

    def attribute_text(self, value: Any) -> str:
        """Returns a text for an op attribute's value; different values have different texts."""
        if value is None or isinstance(value, (bool, int, float, str, bytes, Enum)):
            return f"{type(value).__name__}:{value!r}"
        match value:
            case TensorSpec():  # before mappings, which it is
                return _spec_text(value)
            case tuple() | list():
                return f"{type(value).__name__}({', '.join(map(self.attribute_text, value))})"
            case dict():
                pairs = (
                    f"{self.attribute_text(k)}: {self.attribute_text(v)}" for k, v in value.items()
                )
                return f"dict({', '.join(pairs)})"
            case Graph():
                return "graph"  # the node's regions say what it means
            case Tensor():
                return f"tensor:{self._region_tensor_text(value)}"
            case Stream():
                return f"stream:{self.stream_text(value)}"
        for kind, write in _WRITERS:
            if isinstance(value, kind):
                return write(value)
        raise UncacheableError(f"an attribute of type {type(value).__name__}")

    def _region_tensor_text(self, t: Tensor) -> str:
        """Returns a called graph's tensor as cache-key text: its input index, or its number."""
        ins = t._graph._inputs
        return f"input {ins.index(t)}" if t in ins else self.tensor_text(t)


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.dtype.name}{list(spec.shape)}{list(spec.meta_shape)}"


def _hash_array(x: np.ndarray) -> str:
    data = hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    return f"{x.dtype.str}{list(x.shape)}:{data}"


_WRITERS: tuple[tuple[type, Any], ...] = (
    (dtypes.dtype, lambda v: f"dtype:{v.name}"),
    (np.dtype, lambda v: f"np.dtype:{v}"),
    (np.generic, lambda v: f"np:{_hash_array(np.asarray(v))}"),
    (np.ndarray, lambda v: f"np:{_hash_array(v)}"),
    (ReplicaGrouping, lambda v: f"groups:{v.assignment}"),
)


# ---- ops that users define ----------------------------------------------------------------------
def _is_builtin(defn: OpDef) -> bool:
    return defn.home.partition(".")[0] in _OWN_PACKAGES


def _user_op_lines(op: Op, target: str) -> Iterator[str]:
    """Yields a hash of a user-defined op's StableHLO; its code is not in the source hash."""
    defn = registry()[op.attrs["op_name"]] if op.defn.name == "vjp" else op.defn
    if not _is_builtin(defn):
        yield _lowering_text(op, target)


def _lowering_text(op: Op, target: str) -> str:
    if op.defn.lower is None or op.view:
        raise UncacheableError(
            f"{op.name} at {op.location} is a structural op or view of the user's"
        )
    specs = [jax.ShapeDtypeStruct(t.shape, t.dtype.as_jax()) for t in op.inputs]
    try:
        traced = jax.jit(partial(op.defn.lower, **op.attrs)).trace(*specs)
        text = traced.lower(lowering_platforms=("cuda" if target == "gpu" else target,)).as_text()
    except Exception as error:  # whatever the user's function raises when it stands alone
        raise UncacheableError(f"{op.name} at {op.location} cannot be lowered alone") from error
    for call in re.findall(r"custom_call @(\w+|\"[^\"]+\")", text):
        if not _BUILTIN_CALLS.match(call.strip('"')):
            raise UncacheableError(
                f"{op.name} at {op.location} calls {call}, which lives outside XLA"
            )
    return f"meaning {hashlib.sha256(text.encode()).hexdigest()}"
