"""Each op with inputs of other dtypes, ranks and sizes: it takes them, or refuses them by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import popxl
from popxl import ops
from popxl.errors import popart_exception
from tests.popxl.ops.harness import Case
from tests.popxl.ops.test_records import CASES
from tests.slow import slow

DTYPES = ("float32", "float16", "int32", "uint32", "uint8", "bool", "float8_143", "float8_e4m3fn")
SHARE = 16  # one test tries each SHARE-th
# Words of Python and JAX about their own functions.
FOREIGN = re.compile(
    r"fori_loop|jnp\.|lax\.|no identity|index out of range|empty sequence|has no attribute|"
    r"Too many indices|modulo by zero|NoneType"
)
NAME = re.compile(r"^[a-z]\w*(\(| at |: | takes )")  # an op's, in front


def _specs(case: Case) -> list[popxl.TensorSpec]:
    arrays = (a.astype(case.dtype) if a.dtype == float else a for a in case.record.inputs)
    return [popxl.TensorSpec(a.shape, popxl.dtype.as_dtype(a.dtype)) for a in arrays]


def _others(spec: popxl.TensorSpec) -> Iterator[popxl.TensorSpec]:
    """Specs like one input's, but for the dtype or the shape."""
    for name in DTYPES:
        yield popxl.TensorSpec(spec.shape, popxl.dtype.from_name(name))
    shape = spec.shape
    for other in ((), shape[1:], (2, *shape), (0,) * len(shape), tuple(n + 1 for n in shape)):
        yield popxl.TensorSpec(other, spec.dtype)


def _attempts() -> Iterator[tuple[Case, list[popxl.TensorSpec]]]:
    cases = [case for family in CASES.values() for case in family.values()]
    for case in (case for case in cases if case.dtype == "float32"):
        specs = _specs(case)
        for i, spec in enumerate(specs):
            for other in _others(spec):
                if other != spec:
                    yield case, [*specs[:i], other, *specs[i + 1 :]]


def _message(case: Case, specs: list[popxl.TensorSpec]) -> str | None:
    """Returns the error message; None if the inputs are accepted."""

    def build(*tensors: popxl.Tensor) -> list[popxl.Tensor]:
        made = case.record.build(*tensors)
        return [made] if isinstance(made, popxl.Tensor) else list(made)

    try:
        popxl.Ir().create_graph(build, *specs)
    except (ValueError, TypeError, IndexError, popart_exception) as error:  # others are faults
        return str(error)
    return None


@pytest.mark.parametrize("part", [0, *(slow(n) for n in range(1, SHARE))])
def test_what_an_op_cannot_take_is_refused_by_its_name(part: int) -> None:
    wrong = []
    for number, (case, specs) in enumerate(_attempts()):
        if number % SHARE == part:
            message = _message(case, specs)
            if message is not None and (not NAME.match(message) or FOREIGN.search(message)):
                wrong.append(f"{case.id} of {specs}: {message}")
    assert not wrong, "\n".join(wrong)


F, I, B, H = (popxl.TensorSpec((2, 6), popxl.dtype.from_name(n))
              for n in ("float32", "int32", "bool", "float16"))  # fmt: skip
FP8, V = popxl.TensorSpec((2, 6), popxl.float8_e4m3fn), popxl.TensorSpec((6,), popxl.float32)
MASK, CHANNELS = popxl.TensorSpec((6,), popxl.bool), popxl.TensorSpec((6,), popxl.int32)
SCALARS = [popxl.TensorSpec((), dtype) for dtype in (popxl.bool, popxl.float8_143)]
EMPTY = popxl.TensorSpec((2, 0), popxl.float32)

MEANINGLESS = [
    *((f"{op.__name__} of bool", op, (B,), "not bool")
      for op in (ops.sum, ops.prod, ops.sumsquare, ops.l1, ops.l2, ops.cumsum, ops.lamb_square)),
    *((f"{op.__name__} of float8", op, (FP8,), "float8 takes no arithmetic")
      for op in (ops.max, ops.argmax, ops.argmin, ops.sum, ops.lamb_square)),
    *((f"{op.__name__} of nothing", lambda t, op=op: op(t, 1), (EMPTY,), "at least one element")
      for op in (ops.max, ops.min, ops.median, ops.argmax, ops.argmin, ops.softmax,
                 ops.logsumexp)),
    ("topk of float8", lambda t: ops.topk(t, 2, 1, True, True), (FP8,), "takes no arithmetic"),
    ("matmul of bool", lambda t: ops.matmul(t, t.T), (B,), "not bool"),
    ("classes of floats", lambda t: ops.onehot(
        t, popxl.constant(3, popxl.int32), popxl.constant([0.0, 1.0]), 0), (F,), "integers"),
    ("weights of bool", ops.layer_norm, (F, MASK, V), "floating-point tensors, not bool"),
    ("biases of integers", ops.layer_norm, (F, V, CHANNELS), "floating-point tensors, not int32"),
    ("channels", lambda t, w, b: ops.group_norm(t, w, b, 3), (F, MASK, V), "not bool"),
    ("labels of floats", lambda p, l: ops.nll_loss(p, l), (F, popxl.TensorSpec((2,), F.dtype)),
     "labels are integers, not float32"),
    ("reduced float8", lambda t, i: ops.scatter_reduce(t, i, "sum"), (FP8, I), "no arithmetic"),
    ("another start", lambda t, i, s: ops.scatter_reduce(t, i, "sum", s), (F, I, H), "one dtype"),
    *((f"a factor of {s.dtype.name}", lambda t, f: ops.scaled_add(t, t, a=f), (F, s), "a is a num")
      for s in SCALARS),
]  # fmt: skip


@pytest.mark.parametrize(("build", "specs", "message"), [m[1:] for m in MEANINGLESS],
                         ids=[m[0] for m in MEANINGLESS])  # fmt: skip
def test_what_has_no_meaning_is_refused(build, specs, message) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^\w+.*{message}"):
        popxl.Ir().create_graph(lambda *ts: build(*ts), *specs)
