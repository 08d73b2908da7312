"""How often a run uses each stream, against what the host provides."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from popxl._core.known import found_once
from popxl._core.regions import combine
from popxl.errors import popart_exception

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.streams import Stream


@found_once
def count_transfers(graph: Graph) -> Counter[Stream]:
    """Loads and stores of each stream when `graph` runs once; the larger branch counts."""
    total: Counter[Stream] = Counter()
    for op in graph._ops:
        if "stream" in op.attrs:
            total[op.attrs["stream"]] += 1
        inner: Counter[Stream] = combine(op, count_transfers, Counter(), _sum, _times, _larger)
        total += inner
    return total


def _sum(a: Counter[Stream], b: Counter[Stream]) -> Counter[Stream]:
    return a + b


def _larger(a: Counter[Stream], b: Counter[Stream]) -> Counter[Stream]:
    return a | b


def _times(amount: Counter[Stream], count: int) -> Counter[Stream]:
    return Counter({stream: n * count for stream, n in amount.items()})


def check_transfers(ir: Ir) -> None:
    """Raise popart_exception if a stream is used more often than `ir.num_host_transfers`."""
    for stream, n in count_transfers(ir.main_graph).items():
        if n > ir.num_host_transfers:
            raise popart_exception(
                f"stream {stream.tensor_id!r} is used {n} times in a run, but "
                f"ir.num_host_transfers is {ir.num_host_transfers}: set it to {n}"
            )
