"""Running op records: each against a float64 reference, forward and backward.

A record says how a program writes the op, what goes in, and what torch (or numpy) computes for it.
All records of a family become graphs of one program, since compiling is what costs time. A graph's
gradient graph comes from `popxl.transforms.autodiff`, its reference from torch's autograd.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import ml_dtypes  # noqa: F401 - numpy learns bfloat16
import numpy as np
import torch

import popxl
from popxl import ops
from popxl._analysis.verify import verify_ir
from popxl.transforms import autodiff
from tests import conftest

# Half types: a few roundings of the inputs' own precision, on values of about 1.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class OpRecord:
    """How to test one use of an op.

    Attributes:
        name: label of the case, unique; begins with the public name of the op.
        build: the use: popxl tensors in, tensor or tensors out.
        inputs: float64 arrays take on the dtype of the case, others keep their own.
        reference: the same on torch tensors, float64 for all float inputs.
        dtypes: dtypes to run in.
        grad: whether to compare gradients of the float inputs; ops that change a value in place
            have none.
        why: the reason, if `grad` is False or a tolerance is unusual.
        tolerance: factor on the tolerances of the dtypes.
        outputs: dtypes of the outputs; default: that of the case.
        more: further dtypes, of slow tests.
    """

    name: str
    build: Callable[..., Any]
    inputs: Sequence[np.ndarray]
    reference: Callable[..., Any]
    dtypes: tuple[str, ...] = ("float32", "float16")
    grad: bool = True
    why: str = ""
    tolerance: float = 1.0
    outputs: tuple[str, ...] | None = None
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (not self.grad or self.tolerance != 1.0) and not self.why:
            raise ValueError(f"record {self.name!r} needs a reason in `why`")


def rand(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    """Numbers in [low, high), no two alike, the same in every run."""
    key = zlib.crc32(repr((shape, low, high, seed)).encode())
    return np.random.default_rng(key).uniform(low, high, shape)


def ints(*shape: int, high: int, low: int = 0, dtype: Any = np.int32, seed: int = 0) -> np.ndarray:
    """Integers in [low, high), the same in every run."""
    key = zlib.crc32(repr((shape, low, high, seed)).encode())
    return np.random.default_rng(key).integers(low, high, shape).astype(dtype)


@dataclass
class Case:
    """A record in one dtype, and what came out of the program."""

    record: OpRecord
    dtype: str
    graph: popxl.Graph | None = None
    error: Exception | None = None
    arrays: list[np.ndarray] = field(default_factory=list)
    cotangents: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    grads: dict[int, np.ndarray] = field(default_factory=dict)
    grad: bool = False
    used: set[str] = field(default_factory=set)

    @property
    def id(self) -> str:
        return f"{self.record.name}-{self.dtype}"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype] * self.record.tolerance


def cases_of(records: Sequence[OpRecord], more: bool = False) -> list[Case]:
    return [Case(r, dtype) for r in records for dtype in r.dtypes + r.more * more]


def compile_quickly() -> None:
    """On CPU, let XLA optimise little for the rest of a test."""
    if jax.default_backend() == "cpu":
        conftest.compile_quickly(True)


# ---- the program --------------------------------------------------------------------------------
class _Program:
    """Collects what to feed and what to fetch while the graphs are written."""

    def __init__(self) -> None:
        self.ir = popxl.Ir()
        self.feeds: dict[Any, np.ndarray] = {}
        self.fetches: list[tuple[Any, Callable[[np.ndarray], None]]] = []

    def load(self, array: np.ndarray) -> popxl.Tensor:
        stream = popxl.h2d_stream(array.shape, popxl.dtype.as_dtype(array.dtype))
        self.feeds[stream] = array
        return ops.host_load(stream)

    def store(self, t: popxl.Tensor, keep: Callable[[np.ndarray], None]) -> None:
        stream = popxl.d2h_stream(t.shape, t.dtype)
        ops.host_store(stream, t)
        self.fetches.append((stream, keep))

    def run(self) -> None:
        with popxl.Session(self.ir, "cpu") as session:
            results = session.run(self.feeds)
        for stream, keep in self.fetches:
            keep(results[stream])


def evaluate(build: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Run `build` in the main graph on arrays, and return the values of what it returns."""
    program, outputs = _Program(), []
    with program.ir.main_graph:
        for t in _as_tuple(build)(*map(program.load, arrays)):
            program.store(t, outputs.append)
    verify_ir(program.ir)
    program.run()
    return outputs


def write_cases(cases: Sequence[Case]) -> _Program:
    """Write all cases into one program."""
    program = _Program()
    with program.ir.main_graph:
        for case in cases:
            try:
                _write(program, case)
            except Exception as error:  # one wrong record must not hide the others
                case.error = error
    return program


def run_cases(cases: Sequence[Case]) -> None:
    """Write all cases into one program, check it, run it, and keep the results in the cases."""
    program = write_cases(cases)
    verify_ir(program.ir)
    program.run()


def _write(program: _Program, case: Case) -> None:
    record = case.record
    case.arrays = [
        a.astype(case.dtype) if a.dtype == np.float64 else np.asarray(a) for a in record.inputs
    ]
    inputs = [program.load(a) for a in case.arrays]
    case.graph = graph = program.ir.create_graph(_as_tuple(record.build), *inputs)
    outputs = list(graph.outputs)
    case.used = {op.defn.name for op in graph.ops}
    info = None
    case.grad = record.grad and not any(op.modified_inputs() for op in graph.ops)
    if case.grad:
        wanted = [t for t in graph.inputs if t.dtype.is_floating_point]
        info = autodiff(graph, grads_required=wanted)
        case.used |= {op.defn.name for op in info.graph.ops}
        for op in info.graph.ops:  # a generic gradient runs the op that it differentiates
            case.used |= {op.attrs["op_name"]} if op.defn.name == "vjp" else set()
    site = ops.call_with_info(graph, *inputs)
    for t in site.outputs[: len(outputs)]:
        program.store(t, case.outputs.append)
    if info is not None:
        _write_grads(program, case, info, site)


def _write_grads(program: _Program, case: Case, info: Any, site: Any) -> None:
    provided = [t for t in site.outputs if t.dtype.is_floating_point]
    count = sum(c.connection_type.name == "FwdGrad" for c in info.expected_inputs)
    for i, t in enumerate(provided[:count]):
        case.cotangents.append(rand(*t.shape, seed=100 + i).astype(t.dtype.as_numpy()))
    dys = [program.load(a) for a in case.cotangents]
    back = ops.call_with_info(info.graph, *dys, inputs_dict=info.inputs_dict(site))
    for connection, t in zip(info.expected_outputs, back.outputs, strict=True):
        index = case.graph.inputs.index(connection.fwd_tensor)
        program.store(t, lambda a, i=index: case.grads.update({i: a}))


def _as_tuple(build: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*tensors: popxl.Tensor) -> Any:
        out = build(*tensors)
        return (out,) if isinstance(out, popxl.Tensor) else tuple(out)

    wrapped.__qualname__ = "record"
    return wrapped


# ---- the reference ------------------------------------------------------------------------------
def reference(case: Case) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Outputs and gradients by torch in float64, from the inputs as rounded to their dtypes."""
    tensors = [_double(a) for a in case.arrays]
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    for i in floats:
        tensors[i].requires_grad_(case.grad)
    outs = case.record.reference(*tensors)
    outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
    outs = [torch.as_tensor(o) for o in outs]
    grads: dict[int, np.ndarray] = {}
    if case.grad:
        pairs = zip(
            [o for o in outs if o.is_floating_point()],
            map(_double, case.cotangents),
            strict=True,
        )
        scalar = sum((o * dy).sum() for o, dy in pairs)
        found = torch.autograd.grad(scalar, [tensors[i] for i in floats], allow_unused=True)
        for i, g in zip(floats, found, strict=True):
            grads[i] = np.zeros(case.arrays[i].shape) if g is None else g.numpy()
    return [o.detach().numpy() for o in outs], grads


def _double(array: np.ndarray) -> torch.Tensor:
    if array.dtype in (np.float32, np.float16, np.dtype("bfloat16")):
        return torch.tensor(array.astype(np.float64))
    return torch.tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array)


def check(case: Case) -> None:
    """Compare a case that has run with its reference."""
    if case.error is not None:
        raise case.error
    outs, grads = reference(case)
    assert len(outs) == len(case.outputs)
    dtypes = case.record.outputs or (case.dtype,) * len(outs)
    for got, want, dtype in zip(case.outputs, outs, dtypes, strict=True):
        assert got.dtype == popxl.dtype.from_name(dtype).as_numpy()
        close(got, want, case.tolerance, "output")
    assert set(case.grads) == set(grads)
    for i, want in grads.items():
        assert case.grads[i].dtype == case.arrays[i].dtype
        close(case.grads[i], want, case.tolerance, f"gradient of input {i}")


def close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Equal shapes, and values within `tolerance` relative to the largest finite one."""
    assert got.shape == want.shape, f"{what} has shape {got.shape}, not {want.shape}"
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    finite = np.abs(want[np.isfinite(want)])
    scale = max(1e-3, float(finite.max(initial=0.0)))
    np.testing.assert_allclose(
        got.astype(np.float64), want, rtol=tolerance, atol=tolerance * scale, err_msg=what
    )
