"""Programs drawn at random, against numpy (values, with real views) and torch (gradients).

Hand-written tests look at one feature at a time; these put views, in-place ops, references, calls,
loops and branches together in ways nobody thought of.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.transforms import autodiff, decompose_sum
from tests.popxl.programs import f32, run
from tests.slow import slow

SIZES = [4, 4, 4, 1, 0]  # rows and columns of a program's tensors
ENTRIES = 3
SEEDS = [0, 1, *(slow(i) for i in range(2, 300))]
MORE = range(300, 1500, 100)  # hundreds of programs in one slow test


class Stop(BaseException):
    """Stops the building of a graph; not an `Exception`, like an interrupt."""


# ---- values -------------------------------------------------------------------------------------
@dataclass
class Pair:
    """A tensor in the program, and in NumPy."""

    here: popxl.Tensor
    there: np.ndarray


@dataclass
class Entries:
    """A remote buffer in both worlds."""

    here: popxl.RemoteBuffer
    there: np.ndarray


def _entries(values: np.ndarray, on_disk: int) -> Entries:
    buffer = popxl.remote_buffer(values.shape[1:], popxl.float32, len(values))
    buffer.on_disk = on_disk
    for i, value in enumerate(values):
        popxl.remote_variable(value, buffer, i)
    return Entries(buffer, values)


@dataclass
class Writer:
    """Writes random statements on square tensors, and does the same in numpy.

    Attributes:
        draw: the source of randomness; equal draws give equal programs.
        owners: tensors that own their storage.
        views: views of owners.
        depth: how deep graphs may still nest.
        entries: a remote buffer; None: the program has none.
    """

    draw: random.Random
    owners: list[Pair]
    views: list[Pair] = field(default_factory=list)
    depth: int = 2
    entries: Entries | None = None

    @property
    def size(self) -> int:
        """Rows of each tensor."""
        return len(self.owners[0].there)

    def any(self) -> Pair:
        return self.draw.choice([*self.owners, *self.views])

    def write(self, count: int) -> None:
        kinds: list[Callable[[], None]] = [self.new, self.view, self.in_place, self.overwrite]
        kinds += [self.look]
        if self.depth:
            kinds += [self.call, self.loop, self.branch, self.broken]
        if self.entries:
            kinds += [self.load, self.load_in_place, self.store]
        for _ in range(count):
            self.draw.choice(kinds)()

    # ---- entries of a remote buffer: the host executes graphs with these ---------------
    def _index(self, at: int) -> int | popxl.Tensor:
        """The number of an entry, which maybe only the device knows."""
        if self.draw.random() < 0.7:
            return at
        zero = ops.sum(self.any().here) * 0.0
        return ops.cast(zero, popxl.int32) + at

    def load(self) -> None:
        assert self.entries is not None
        at = self.draw.randrange(ENTRIES)
        here = ops.remote_load(self.entries.here, self._index(at))
        self.owners.append(Pair(here, self.entries.there[at].copy()))

    def load_in_place(self) -> None:
        assert self.entries is not None
        at, target = self.draw.randrange(ENTRIES), self.any()
        ops.remote_load_(self.entries.here, self._index(at), target.here)
        target.there[...] = self.entries.there[at]

    def store(self) -> None:
        assert self.entries is not None
        at, value = self.draw.randrange(ENTRIES), self.any()
        ops.remote_store(self.entries.here, self._index(at), value.here)
        self.entries.there[at] = value.there

    # Values stay small: sums are halved.
    def new(self) -> None:
        a, b = self.any(), self.any()
        transposed = self.draw.random() < 0.3
        here = (a.here + (b.here.T if transposed else b.here)) * 0.5
        there = (a.there + (b.there.T if transposed else b.there)) * np.float32(0.5)
        self.owners.append(Pair(here, there))

    def view(self) -> None:
        of = self.any()
        for _ in range(self.draw.choice([1, 1, 1, 20])):  # now and then far from the owner
            kind = self.draw.randrange(3)
            if kind == 0:
                of = Pair(of.here.T_, of.there.T)
            elif kind == 1:  # a permutation of rows by a view: reverse them
                of = Pair(ops.slice_(of.here, step=-1), of.there[::-1])
            else:  # with reshapes between, which no view of a slice or a transpose is merged with
                n = self.size
                here = ops.transpose_(ops.reshape_(of.here, (n, 1, n)), (1, 2, 0))
                of = Pair(ops.reshape_(here, (n, n)), of.there.T)
        self.views.append(of)

    def in_place(self) -> None:
        target, by = self.any(), self.any()
        row = self.draw.randrange(max(self.size, 1))
        if self.draw.random() < 0.5:
            ops.add_(target.here, ops.sin(by.here))
            target.there += np.sin(by.there)
        else:
            part = ops.slice_(target.here, row, row + 1)
            ops.add_(part, by.here[row : row + 1])
            target.there[row : row + 1] += by.there[row : row + 1].copy()

    def overwrite(self) -> None:
        target, by = self.any(), self.any()
        ops.var_updates.copy_var_update_(target.here, ops.tanh(by.here))
        target.there[...] = np.tanh(by.there)

    # ---- graphs -----------------------------------------------------------------------------
    def _inner(self, seed: int, inputs: list[Pair], entries: Entries | None) -> list[Pair]:
        """Statements of a called graph; returns its output, and values that may be inputs."""
        inner = Writer(random.Random(seed), inputs, [], self.depth - 1, entries)
        inner.write(3)
        return [inner.any(), inner.draw.choice(inner.owners)]

    def _graph(
        self,
        seed: int,
        by_ref: list[bool],
        args: list[Pair],
        more: bool = False,
        stop: Stop | None = None,
    ) -> popxl.Graph:
        """The graph of `_inner(seed)`; its numpy side works on throw-away arrays.

        Args:
            more: return the output twice, and the second value, which may be an input.
            stop: raised in the end.
        """

        def fn(*tensors):
            scratch = [np.zeros(t.shape, np.float32) for t in tensors]
            pairs = [Pair(t, s) for t, s in zip(tensors, scratch, strict=True)]
            scratch_entries = self.entries and Entries(
                self.entries.here, np.zeros_like(self.entries.there)
            )
            first, second = self._inner(seed, pairs, scratch_entries)
            output = ops.tanh(first.here)
            if stop is not None:
                raise stop
            return [output, output, second.here] if more else output

        graph = popxl.gir().create_graph(fn, *(a.here for a in args))
        for t, ref in zip(graph.inputs, by_ref, strict=True):
            t._by_ref = ref
        return graph

    def _replay(self, seed: int, by_ref: list[bool], args: list[np.ndarray]) -> list[np.ndarray]:
        """Replays the program in NumPy: references are the arrays themselves, values are copies."""
        arrays = [a if ref else a.copy() for a, ref in zip(args, by_ref, strict=True)]
        first, second = _numpy_only(self, seed, arrays)
        return [np.tanh(first), np.tanh(first), second]

    def _arguments(self) -> tuple[list[Pair], list[bool], int]:
        """Tensors, views of them and parts of one, some of them by reference. References must not
        overlap: which of two changes wins is not defined."""
        kind = self.draw.choice(["owners", "owners", "view", "parts"])
        if kind == "parts":
            args = self._parts()
        else:
            args = self.draw.sample(self.owners, 2)
        if kind == "view" and self.views:
            view = self.draw.choice(self.views)
            if not np.shares_memory(view.there, args[1].there):
                args[0] = view
        by_ref = [self.draw.random() < 0.5 for _ in args]
        return args, by_ref, self.draw.randrange(2**30)

    def _parts(self) -> list[Pair]:
        """The first rows and the last rows of something twice as long."""
        a, b = self.any(), self.any()
        here = ops.concat([a.here, b.here]) * 0.5
        there = np.concatenate([a.there, b.there]) * np.float32(0.5)
        step = self.draw.choice([1, -1])
        n = self.size
        ends = [(0, n), (n, 2 * n)] if step == 1 else [(2 * n - 1, n - 1), (n - 1, None)]
        parts = [
            Pair(ops.slice_(here, start, stop, step), there[start:stop:step])
            for start, stop in ends
        ]
        self.views += parts
        return parts

    def call(self) -> None:
        args, by_ref, seed = self._arguments()
        graph = self._graph(seed, by_ref, args, more=True)
        outputs = ops.call(graph, *(a.here for a in args))
        there = self._replay(seed, by_ref, [a.there for a in args])
        self.owners += map(Pair, outputs, there)

    def loop(self) -> None:
        args, (_, second), seed = self._arguments()
        by_ref, count = [False, second], self.draw.choice([0, 1, 3])
        graph = self._graph(seed, by_ref, args)
        (here,) = ops.repeat(graph, count, *(a.here for a in args))
        there = args[0].there.copy()
        for _ in range(count):
            there = self._replay(seed, by_ref, [there, args[1].there])[0]
        self.owners.append(Pair(here, there))

    def broken(self) -> None:
        """A graph whose making raises is none of the program."""
        args, by_ref, seed = self._arguments()
        before, inner = len(popxl.gir()._graphs), Stop(seed)
        with pytest.raises(Stop, match=str(seed)):
            self._graph(seed, by_ref, args, stop=inner)
        assert all(graph.outputs for graph in popxl.gir()._graphs[before:])

    def look(self) -> None:
        """Looking at a program that is being written changes nothing."""
        assert str(popxl.gcg().functional)

    def branch(self) -> None:
        taken = self.draw.random() < 0.5
        sides = [self._arguments() for _ in range(2)]
        graphs = [self._graph(seed, by_ref, args, more=True) for args, by_ref, seed in sides]
        inputs = [[a.here for a in args] for args, _, _ in sides]
        outputs = ops.conditional(popxl.constant(taken), *graphs, *inputs)
        args, by_ref, seed = sides[0 if taken else 1]
        there = self._replay(seed, by_ref, [a.there for a in args])
        self.owners += map(Pair, outputs, there)


def _numpy_only(writer: Writer, seed: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Run the numpy side of `_inner`, writing the popxl side into a program that is thrown away.

    In a thread of its own, because within one graph no graph of another program can be written.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(_written_aside, writer, seed, arrays).result()


def _written_aside(writer: Writer, seed: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
    with popxl.Ir().main_graph:
        pairs = [Pair(popxl.variable(np.zeros(a.shape, np.float32)), a) for a in arrays]
        entries = writer.entries
        if entries is not None:
            scratch = popxl.remote_buffer(entries.there.shape[1:], popxl.float32, ENTRIES)
            entries = Entries(scratch, entries.there)
        return [p.there.copy() for p in writer._inner(seed, pairs, entries)]


WITH_ENTRIES = pytest.mark.parametrize(
    "with_entries", [False, True], ids=["one segment", "with entries"]
)


def _check_values(seed: int, with_entries: bool, past_the_end: bool = False) -> None:
    """Write a program, run it, and compare everything that it holds with numpy.

    Args:
        past_the_end: in the end it loads an entry that is not there, as only the device knows.
    """
    draw = random.Random(f"sizes of {seed}")
    size, on_disk = draw.choice(SIZES), draw.choice([0, 0, 1, ENTRIES])
    inputs = [f32(size, size, seed=i) for i in range(3)]
    expected: list[np.ndarray] = []

    def build(*tensors):
        pairs = [Pair(ops.identity(t), x.copy()) for t, x in zip(tensors, inputs, strict=True)]
        entries = _entries(f32(ENTRIES, size, size, seed=9), on_disk) if with_entries else None
        writer = Writer(random.Random(seed), pairs, entries=entries)
        writer.write(14)
        for i in range(ENTRIES if entries else 0):  # what is left in the buffer
            writer.owners.append(Pair(ops.remote_load(entries.here, i), entries.there[i]))
        everything = [*writer.owners, *writer.views]
        expected.extend(p.there for p in everything)
        if past_the_end:
            at = ops.cast(ops.sum(everything[-1].here) * 0.0, popxl.int32)
            ops.remote_load(entries.here, at + draw.choice([-1, ENTRIES, 2**30]))
        return [p.here for p in everything]

    with TemporaryDirectory() as disk:
        found = run(build, *inputs, disk=Path(disk))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [slow(0), 1, *(slow(i) for i in range(6, 300))])
def test_random_programs_say_that_an_entry_is_not_there(seed):
    with pytest.raises(IndexError, match=rf"which has {ENTRIES} entries"):
        _check_values(seed, True, past_the_end=True)


@pytest.mark.parametrize(
    ("with_entries", "seed"),
    [
        (entries, seed) if seed in some else slow(entries, seed)
        for entries, some in ((False, (5,)), (True, (0, 2)))
        for seed in range(300)
    ],
)
def test_random_programs_give_numpy_s_values(with_entries, seed):
    _check_values(seed, with_entries)


@pytest.mark.slow
@pytest.mark.parametrize("first", MORE)
@WITH_ENTRIES
def test_hundreds_of_random_programs(first, with_entries):
    for seed in range(first, first + 100):
        _check_values(seed, with_entries)


# ---- gradients ----------------------------------------------------------------------------------
GRADIENT_SHAPE = (3, 3)


def _torch_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


UNARY = [(ops.tanh, torch.tanh), (ops.sin, torch.sin), (ops.gelu, _torch_gelu)]


def _statements(draw: random.Random, here: list[Any], there: list[Any], count: int) -> None:
    """Random differentiable statements."""
    for _ in range(count):
        i, j = draw.randrange(len(here)), draw.randrange(len(here))
        kind = draw.choice(["unary", "mul", "matmul", "view", "call", "loop", "branch"])
        if kind == "unary":
            f, g = draw.choice(UNARY)
            here.append(f(here[i]))
            there.append(g(there[i]))
        elif kind == "mul":
            here.append(here[i] * here[j])
            there.append(there[i] * there[j])
        elif kind == "matmul":
            here.append(here[i] @ here[j] * 0.3)
            there.append(there[i] @ there[j] * 0.3)
        elif kind == "view":
            here.append(here[i].T_)
            there.append(there[i].T)
        else:
            _nested(draw, kind, here, there, i, j)


def _nested(draw: random.Random, kind: str, here: list, there: list, i: int, j: int) -> None:
    """A call, loop or branch of a graph that may return its inputs, and one thing twice."""
    seed, outputs = draw.randrange(2**30), draw.choice([1, 2])

    def body(a, b):
        values = [a, b]
        inner = random.Random(seed)
        _simple(inner, values)
        return [inner.choice([*values, values[-1]]) for _ in range(outputs)]

    graph = popxl.gir().create_graph(body, here[i], here[j])
    count = 3 if kind == "loop" else 1
    if kind == "loop":
        here += ops.repeat(graph, count, here[i], here[j])
    elif kind == "call":
        here += ops.call(graph, here[i], here[j])
    else:
        taken, inputs = popxl.constant(draw.random() < 0.5), [here[i], here[j]]
        here += ops.conditional(taken, graph, graph, inputs, inputs)
    values = [there[i], there[j]]
    for _ in range(count):
        values[:outputs] = body(*values)
    there += values[:outputs]


def _simple(draw: random.Random, values: list[Any]) -> None:
    """Statements that read alike for both kinds of tensors."""
    for _ in range(3):
        i, j = draw.randrange(len(values)), draw.randrange(len(values))
        sine = ops.sin if isinstance(values[i], popxl.Tensor) else torch.sin
        values.append(sine(values[i]) * values[j] if draw.random() < 0.5 else sine(values[j]) * 0.7)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs_give_torch_s_gradients(seed):
    inputs = [f32(*GRADIENT_SHAPE, seed=i) * np.float32(0.7) for i in range(2)]
    theirs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    expected: list[torch.Tensor] = []

    def forward(*tensors):
        here, there = list(tensors), list(theirs)
        _statements(random.Random(seed), here, there, 10)
        expected[:] = there
        return here

    def build(*tensors):
        graph = popxl.gir().create_graph(forward, *tensors)
        count = len(graph.outputs)
        call = ops.call_with_info(graph, *tensors)
        info = autodiff(graph, grads_required=graph.inputs)
        decompose_sum(info.graph)
        seeds = [popxl.constant(np.ones(GRADIENT_SHAPE, np.float32))] * count
        grads = ops.call(info.graph, *seeds, inputs_dict=info.inputs_dict(call))
        return [*call.outputs[:count], *grads]

    found = run(build, *inputs)
    sum(y.sum() for y in expected).backward()
    for a, b in zip(found, [*expected, *(t.grad for t in theirs)], strict=True):
        wanted = b.detach().numpy()
        scale = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(a / scale, wanted / scale, rtol=1e-3, atol=1e-4)
