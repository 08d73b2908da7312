"""A small language of tensor programs, drawn at random by hypothesis.

A program is data: `Body`, a list of `Step`s on numbered tensors, which may hold further bodies
(called, repeated, or chosen between). `meanings` gives it to popxl, numpy and JAX; the tests
compare them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Shape = tuple[int, ...]
LARGEST = 48  # elements of a tensor
SHAPES: tuple[Shape, ...] = ((), (4,), (3, 4), (4, 3), (2, 3), (2, 1, 4))

UNARY = ("tanh", "sin", "swish", "gelu", "negate", "half")
UNARY_WITH_KINKS = ("abs", "relu")
BINARY = ("add", "sub", "mul", "quotient")
BINARY_WITH_KINKS = ("maximum",)
REDUCTIONS = ("mean", "sumsquare", "logsumexp")
REDUCTIONS_WITH_KINKS = ("max", "min")
SHAPE_OPS = ("reshape", "transpose", "slice")
VIEWS = ("reshape_", "transpose_", "slice_")
IN_PLACE = ("add_", "scaled_add_", "copy_var_update_", "accumulate_", "tanh_copy")
IN_PLACE_UNARY = ("relu_", "gelu_", "swish_")
NESTED = ("call", "repeat", "conditional")


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        kind: one of the names above.
        args: numbers of the tensors it takes.
        params: whatever else the kind needs.
    """

    kind: str
    args: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Body:
    """Steps on tensors 0..n-1, the inputs, and on results, which are numbered from n.

    Attributes:
        inputs: shapes.
        outputs: numbers of the tensors returned, whose shapes are `output_shapes`.
        by_ref: which inputs are by-reference.
    """

    inputs: tuple[Shape, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    output_shapes: tuple[Shape, ...]
    by_ref: tuple[bool, ...]


@dataclass
class _Writer:
    """Draws the steps of a body."""

    draw: Callable[[st.SearchStrategy], Any]
    shapes: list[Shape]
    smooth: bool  # no kinks, no changes in place: what a gradient is taken of
    depth: int
    # Tensors that own the storage of each.
    owners: list[frozenset[int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.owners = [frozenset([i]) for i in range(len(self.shapes))]

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def tensor(self, fits: Callable[[Shape], bool] = lambda shape: True) -> int | None:
        options = [i for i, shape in enumerate(self.shapes) if fits(shape)]
        return self.pick(options) if options else None

    def add(self, step: Step, *results: Shape, owners: frozenset[int] = frozenset()) -> None:
        self.steps.append(step)
        for shape in results:
            self.owners.append(owners or frozenset([len(self.shapes)]))
            self.shapes.append(shape)

    def write(self, count: int) -> None:
        kinks = not self.smooth
        kinds: list[Callable[[], None]] = [
            lambda: self.unary(UNARY + UNARY_WITH_KINKS * kinks),
            lambda: self.binary(BINARY + BINARY_WITH_KINKS * kinks),
            lambda: self.reduction(REDUCTIONS + REDUCTIONS_WITH_KINKS * kinks),
            lambda: self.reshaped(SHAPE_OPS + VIEWS),
            self.joined,
        ]
        if kinks:
            kinds += [self.in_place, self.in_place, lambda: self.reshaped(VIEWS), self.joined_view]
        if self.depth:
            kinds += [self.call, self.repeat, self.conditional]
        for _ in range(count):
            self.pick(kinds)()

    # ---- values -----------------------------------------------------------------------------
    def unary(self, kinds: Sequence[str]) -> None:
        a = self.tensor()
        self.add(Step(self.pick(kinds), (a,)), self.shapes[a])

    def binary(self, kinds: Sequence[str]) -> None:
        a = self.tensor()
        b = self.tensor(lambda shape: broadcast(self.shapes[a], shape) is not None)
        self.add(Step(self.pick(kinds), (a, b)), broadcast(self.shapes[a], self.shapes[b]))

    def joined(self) -> None:
        """A product of matrices, a concatenation, or a softmax."""
        a = self.tensor(lambda shape: len(shape) >= 1)
        if a is None:
            return
        shape = self.shapes[a]
        axis = self.draw(st.integers(0, len(shape) - 1))
        b = self.tensor(lambda s: len(s) == len(shape) == 2 and s[0] == shape[-1])
        kind = self.pick(("matmul", "concat", "softmax"))
        joint = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        if kind == "matmul" and b is not None:
            self.add(Step("matmul", (a, b)), (shape[0], self.shapes[b][1]))
        elif kind == "concat" and math.prod(joint) <= LARGEST:
            other = self.tensor(lambda s: s == shape)
            self.add(Step("concat", (a, other), (axis,)), joint)
        else:
            self.add(Step("softmax", (a,), (axis,)), shape)

    def reduction(self, kinds: Sequence[str]) -> None:
        a = self.tensor(lambda shape: len(shape) >= 1)
        if a is None:
            return
        shape = self.shapes[a]
        axis = self.draw(st.none() | st.integers(0, len(shape) - 1))
        keep = self.draw(st.booleans())
        gone = range(len(shape)) if axis is None else [axis]
        dims = [1 if i in gone else d for i, d in enumerate(shape) if keep or i not in gone]
        self.add(Step(self.pick(kinds), (a,), (axis, keep)), tuple(dims))

    def reshaped(self, kinds: Sequence[str]) -> None:
        """The same elements, or some of them, in another form: copied, or as a view."""
        a = self.tensor(lambda shape: len(shape) >= 1)
        if a is None:
            return
        shape, kind = self.shapes[a], self.pick(kinds)
        params: tuple[Any, ...]
        if kind.startswith("reshape"):
            n = math.prod(shape)
            params = (self.pick([(n,), (1, n), (n, 1), *_halves(n), shape]),)
            result = params[0]
        elif kind.startswith("transpose"):
            params = (tuple(self.draw(st.permutations(range(len(shape))))),)
            result = tuple(shape[i] for i in params[0])
        else:
            axis = self.draw(st.integers(0, len(shape) - 1))
            start = self.draw(st.integers(0, shape[axis] - 1))
            stop = self.draw(st.integers(start + 1, shape[axis]))
            step = self.draw(st.integers(1, 2))
            if self.draw(st.booleans()):
                start, stop, step = stop - 1, start - 1, -step
            params = (axis, start, None if stop < 0 else stop, step)
            count = len(range(shape[axis])[start : params[2] : step])
            result = (*shape[:axis], count, *shape[axis + 1 :])
        owners = self.owners[a] if kind in VIEWS else frozenset[int]()
        self.add(Step(kind, (a,), params), result, owners=owners)

    def joined_view(self) -> None:
        """One tensor that stands for two."""
        a = self.tensor(lambda shape: len(shape) >= 1)
        if a is None:
            return
        shape = self.shapes[a]
        axis = self.draw(st.integers(0, len(shape) - 1))
        joint = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        apart = [
            i
            for i, (s, owners) in enumerate(zip(self.shapes, self.owners, strict=True))
            if s == shape and not owners & self.owners[a]
        ]
        if apart and math.prod(joint) <= LARGEST:
            b = self.pick(apart)
            step = Step("concat_", (a, b), (axis,))
            self.add(step, joint, owners=self.owners[a] | self.owners[b])

    def in_place(self) -> None:
        target = self.tensor()
        by = self.tensor(lambda shape: shape == self.shapes[target])
        kind = self.pick(IN_PLACE + IN_PLACE_UNARY)
        self.add(Step(kind, (target,) if kind in IN_PLACE_UNARY else (target, by)))

    # ---- graphs -----------------------------------------------------------------------------
    def _body(self, args: Sequence[int], fixed: int, outputs: Sequence[Shape] | None) -> Body:
        """A body for these arguments.

        Args:
            fixed: how many of the first inputs must be by value.
            outputs: shapes to return; None: any one or two.
        """
        inner = _Writer(self.draw, [self.shapes[a] for a in args], self.smooth, self.depth - 1)
        inner.write(self.draw(st.integers(1, 4)))
        if outputs is None:
            outputs = [inner.shapes[inner.tensor()] for _ in range(self.draw(st.integers(1, 2)))]
        returned = []
        for shape in outputs:  # the latest of that shape, through one more op
            found = max((i for i, s in enumerate(inner.shapes) if s == shape), default=None)
            if found is None:
                found = len(inner.shapes)
                inner.add(Step("zeros", (), (shape,)), shape)
            returned.append(len(inner.shapes))
            inner.add(Step("sin", (found,)), shape)
        by_ref = [
            not self.smooth and i >= fixed and self._unshared(args, i) and self.draw(st.booleans())
            for i in range(len(args))
        ]
        return Body(
            tuple(self.shapes[a] for a in args),
            tuple(inner.steps),
            tuple(returned),
            tuple(outputs),
            tuple(by_ref),
        )

    def _unshared(self, args: Sequence[int], index: int) -> bool:
        """References must not overlap: which of two changes comes last is not defined."""
        others = [self.owners[a] for i, a in enumerate(args) if i != index]
        return not any(self.owners[args[index]] & owners for owners in others)

    def arguments(self) -> tuple[int, ...]:
        return tuple(self.tensor() for _ in range(self.draw(st.integers(1, 3))))

    def call(self) -> None:
        args = self.arguments()
        body = self._body(args, 0, None)
        self.add(Step("call", args, (body,)), *body.output_shapes)

    def repeat(self) -> None:
        args = self.arguments()
        carried = self.draw(st.integers(1, len(args)))
        body = self._body(args, carried, [self.shapes[a] for a in args[:carried]])
        count = self.draw(st.integers(0, 3))
        self.add(Step("repeat", args, (body, count)), *body.output_shapes)

    def conditional(self) -> None:
        then_args, else_args = self.arguments(), self.arguments()
        then = self._body(then_args, 0, None)
        otherwise = self._body(else_args, 0, then.output_shapes)
        of = self.tensor()
        params = (then, otherwise, len(then_args))
        args = (of, *then_args, *else_args)
        self.add(Step("conditional", args, params), *then.output_shapes)


def _halves(n: int) -> list[Shape]:
    return [(2, n // 2)] if n % 2 == 0 else []


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """Shape of an elementwise result of shapes that fit each other, and fit here."""
    if len(a) < len(b):
        a, b = b, a
    padded = (1,) * (len(a) - len(b)) + b
    if any(x != y and 1 not in (x, y) for x, y in zip(a, padded, strict=True)):
        return None
    shape = tuple(map(max, a, padded))
    return shape if math.prod(shape) <= LARGEST else None


@st.composite
def bodies(draw: Any, steps: int, smooth: bool = False, depth: int = 2) -> Body:
    """Main programs of `steps` steps on three inputs; all tensors are outputs.

    Args:
        smooth: only what has a gradient everywhere: no kinks, no changes in place.
        depth: how deep bodies nest.
    """
    inputs = [(3, 4), draw(st.sampled_from(SHAPES)), draw(st.sampled_from(SHAPES))]
    writer = _Writer(draw, list(inputs), smooth, depth)
    writer.write(steps)
    everything = tuple(range(len(writer.shapes)))
    shapes = tuple(writer.shapes)
    return Body(tuple(inputs), tuple(writer.steps), everything, shapes, (False,) * 3)
