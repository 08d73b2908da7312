"""Side effects of graphs: the state that a graph and the graphs it calls read and write.

State is remote buffers and stream positions (variables reach graphs as by-reference inputs). The
lowering threads exactly this state through loops and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._analysis.memo import graph_cached
from popxl._ir.regions import G, Region, regions

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer
    from popxl.streams import DeviceToHostStream, HostToDeviceStream


@dataclass
class Effects:
    """Remote buffers, streams and checked ops that ops use: ordered sets (dicts of None)."""

    reads: dict[RemoteBuffer, None] = field(default_factory=dict)
    writes: dict[RemoteBuffer, None] = field(default_factory=dict)
    loads: dict[HostToDeviceStream, None] = field(default_factory=dict)
    stores: dict[DeviceToHostStream, None] = field(default_factory=dict)
    impure: bool = False  # acts on the outside world, such as printing
    checks: dict[Op, None] = field(default_factory=dict)  # no state: ops that may stop the run

    def add(self, other: Effects) -> None:
        self.reads.update(other.reads)
        self.writes.update(other.writes)
        self.loads.update(other.loads)
        self.stores.update(other.stores)
        self.impure |= other.impure
        self.checks.update(other.checks)

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes or self.loads or self.stores or self.impure)


def combine_effects(
    ops: Iterable[tuple[Op, Iterable[Region[G]]]], effects_of_graph: Callable[[G], Effects]
) -> Effects:
    """Returns the union of the effects of ops and of the graphs that they run."""
    effects = Effects()
    for op, inside in ops:
        if op.defn.effects is not None:
            effects.add(op.defn.effects(op))
        if op.defn.check is not None:
            effects.checks[op] = None
        for region in inside:
            effects.add(effects_of_graph(region.graph))
    return effects


def op_effects(op: Op) -> Effects:
    """Returns the state that one op reads and writes, in the graphs that it runs too."""
    return combine_effects([(op, regions(op))], graph_effects)


@graph_cached
def graph_effects(graph: Graph) -> Effects:
    """Returns the state that one execution of `graph` reads and writes."""
    return combine_effects(((op, regions(op)) for op in graph._ops), graph_effects)


def program_effects(ir: Ir) -> Effects:
    """Returns the state that a run of the whole program reads and writes."""
    return graph_effects(ir.main_graph)
