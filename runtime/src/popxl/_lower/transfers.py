"""How often a run uses each stream, against what the host provides."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from popxl.errors import popart_exception

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.streams import Stream


def count_transfers(graph: Graph) -> Counter[Stream]:
    """Loads and stores of each stream when `graph` runs once; the larger branch counts."""
    total: Counter[Stream] = Counter()
    for op in graph._ops:
        if "stream" in op.attrs:
            total[op.attrs["stream"]] += 1
        elif "then" in op.attrs:
            total += count_transfers(op.attrs["then"]) | count_transfers(op.attrs["otherwise"])
        elif "graph" in op.attrs:
            times = op.attrs.get("count", 1)
            inner = count_transfers(op.attrs["graph"])
            total.update({s: n * times for s, n in inner.items()})
    return total


def check_transfers(ir: Ir) -> None:
    """Raise popart_exception if a stream is used more often than `ir.num_host_transfers`."""
    for stream, n in count_transfers(ir.main_graph).items():
        if n > ir.num_host_transfers:
            raise popart_exception(
                f"stream {stream.tensor_id!r} is used {n} times in a run, but "
                f"ir.num_host_transfers is {ir.num_host_transfers}: set it to {n}"
            )
