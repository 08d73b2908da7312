"""Segments: compiled units of a program that run on the devices between two host steps.

A segment is a list of nodes of a functional graph, with the values that it takes and those that
later steps read. Its function takes and returns flat lists of arrays, of which each replica has its
own part (`popxl._compile.segment_function`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from popxl import dtypes
from popxl._analysis.effects import Effects
from popxl._analysis.functionalization import count_stochastic_roundings, effects_of_nodes
from popxl._ir.debug_flags import STEPWISE, is_debug_flag_set
from popxl.tensor import Constant, TensorSpec

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node, Value
    from popxl._ir.op import Op
    from popxl.streams import Stream

ROUNDING_COUNT = TensorSpec((), dtypes.uint32)  # of the number of random roundings so far


@dataclass(frozen=True)
class ProgramContext:
    """Program-wide settings that its segments share, such as replicas, checks and rounding.

    Attributes:
        checks: ops whose rules on values are checked, with a number from 1 for each.
        rounding: whether updates of 16-bit variables use stochastic rounding.
        replicas: number of replicas.
        transfers: transfers of each stream in a run.
        target: what they are traced for: "cpu", "gpu", "tpu", or with the compute capability of
            a GPU "gpu 9.0".
        watched: ops whose results must be finite, with a number for each, after those of checks.
        infinite: whether infinities count as non-finite, besides NaN.
    """

    checks: dict[Op, int]
    rounding: bool
    replicas: int
    transfers: int
    target: str
    watched: Mapping[Op, int] = field(default_factory=dict)
    infinite: bool = False


@dataclass(eq=False)
class Segment:
    """Nodes that the devices run between two steps of the host.

    Attributes:
        name: for people.
        nodes: in program order.
        args: the values that it takes.
        scalar_args: indices of the arguments that are host scalars.
        results: the values that it returns.
        donated: arguments whose memory results may take.
    """

    name: str
    nodes: list[Node] = field(default_factory=list)
    args: list[Value] = field(default_factory=list)
    scalar_args: frozenset[int] = frozenset()
    results: list[Value] = field(default_factory=list)
    donated: tuple[int, ...] = ()
    context: ProgramContext | None = None

    @cached_property
    def effects(self) -> Effects:
        """Streams, runtime checks and side effects of the segment's nodes."""
        return effects_of_nodes(self.nodes)

    @cached_property
    def streams(self) -> list[Stream]:
        """Host streams that the segment loads from or stores to."""
        return sorted({*self.effects.loads, *self.effects.stores}, key=lambda s: s.tensor_id)

    @cached_property
    def output_streams(self) -> list[Stream]:
        """Host streams that the segment stores to."""
        return sorted(self.effects.stores, key=lambda s: s.tensor_id)

    @cached_property
    def constants(self) -> list[Constant]:
        """Distinct constants that the compiled segment takes as arguments."""
        constants = _constants_of(self.nodes)
        _collect_constants(self.results, constants)
        return list(constants.values())

    @cached_property
    def num_stochastic_roundings(self) -> int:
        """Number of variable updates rounded stochastically in one execution of the segment."""
        return sum(map(count_stochastic_roundings, self.nodes))

    @cached_property
    def region_label(self) -> str:
        """Labels of the program regions that the segment's nodes belong to; "": that of its run."""
        return " + ".join(dict.fromkeys(node.part for node in self.nodes if node.part))

    @property
    def arg_specs(self) -> list[TensorSpec]:
        """Specs (shape, dtype) of the segment's arguments on one replica."""
        return [TensorSpec(v.spec.shape, v.spec.dtype) for v in self.args]

    @property
    def result_specs(self) -> list[TensorSpec]:
        """Specs (shape, dtype) of the segment's results on one replica."""
        return [TensorSpec(v.spec.shape, v.spec.dtype) for v in self.results]

    @cached_property
    def has_checks(self) -> bool:
        """True if the segment has runtime checks of values, or checks for NaN and infinity."""
        context = program_context(self)
        return bool(context.watched) or not context.checks.keys().isdisjoint(self.effects.checks)

    @cached_property
    def rounds_stochastically(self) -> bool:
        """True if an op of the segment rounds an update stochastically to 16 bits."""
        return program_context(self).rounding and self.num_stochastic_roundings > 0

    @cached_property
    def result_bytes(self) -> int:
        """Bytes of the segment's results on one replica."""
        return nbytes_of(self.result_specs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the segment's arguments and results on one replica, without stream data."""
        return nbytes_of(self.arg_specs) + self.result_bytes


def nbytes_of(specs: Iterable[TensorSpec]) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)


def program_context(segment: Segment) -> ProgramContext:
    """Returns the settings of the program that `segment` belongs to."""
    assert segment.context is not None
    return segment.context


def _collect_constants(values: Iterable[Value], constants: dict[int, Constant]) -> None:
    for t in (v.tensor for v in values if v.node is None):
        if isinstance(t, Constant) and t._is_executable_argument:
            constants.setdefault(t._content_key, t)


def _constants_of(nodes: Iterable[Node]) -> dict[int, Constant]:
    """Returns the constants that nodes and the graphs they run read, by key of their content."""
    constants: dict[int, Constant] = {}
    seen: set[FunctionalGraph] = set()
    worklist = [nodes]
    while worklist:
        for node in worklist.pop():
            _collect_constants(node.inputs, constants)
            for graph in (region.graph for region in node.regions):
                if graph not in seen:
                    seen.add(graph)
                    _collect_constants(graph.outputs, constants)
                    worklist.append(graph.nodes)
    return constants


# ---- its function, as data -----------------------------------------------------------------------
def argument_specs(segment: Segment) -> list[tuple[TensorSpec, bool]]:
    """Returns the spec of each executable argument, with True where replicas have separate values.

    Arguments, stream data and positions, constants, fault, seed and rounding count.
    """
    specs = [(s, i not in segment.scalar_args) for i, s in enumerate(segment.arg_specs)]
    specs += [
        (TensorSpec((program_context(segment).transfers, *s.shape), s.dtype), True)
        for s in segment.streams
    ]
    specs += [(TensorSpec((), dtypes.int32), True) for _ in segment.streams]
    specs += [(TensorSpec(c.shape, c.dtype), False) for c in segment.constants]
    specs += [(TensorSpec((), dtypes.int32), True)] if segment.has_checks else []
    if segment.rounds_stochastically:
        specs += [(TensorSpec((2,), dtypes.uint32), False), (ROUNDING_COUNT, False)]
    return specs


def result_specs(segment: Segment) -> list[TensorSpec]:
    """Returns a segment's executable result specs: values, stream data and positions, fault."""
    specs = segment.result_specs
    specs += [
        TensorSpec((program_context(segment).transfers, *s.shape), s.dtype)
        for s in segment.output_streams
    ]
    specs += [TensorSpec((), dtypes.int32) for _ in segment.streams]
    return specs + ([TensorSpec((), dtypes.int32)] if segment.has_checks else [])


def donated_argnums(segment: Segment) -> tuple[int, ...]:
    """Returns the indices of executable arguments whose memory XLA may reuse for results."""
    first = len(segment.args)
    streams = () if is_debug_flag_set(STEPWISE) else segment.streams
    output_streams = [first + i for i, s in enumerate(streams) if s in segment.output_streams]
    return (*segment.donated, *output_streams)
