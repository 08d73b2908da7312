"""Short tensor names for the text form of graphs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from popxl._analysis.memo import graph_cached

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.tensor import Tensor

_LONG = 40  # characters of a result's name, without its scopes


@graph_cached
def _short_names(graph: Graph) -> dict[Tensor, str]:
    """Returns shortened names of a graph's results.

    First and last words of the name, made unique by a number.
    """
    short: dict[Tensor, str] = {}
    times: Counter[str] = Counter()
    for t in graph._tensors.values():
        scopes, slash, base = t.name.rpartition("/")
        if t._producer is not None and len(base) > _LONG:
            begin = base[:24].rpartition("_")[0] or base[:24]
            cut = f"{scopes}{slash}{begin}.._{base[-16:].partition('_')[2] or base[-16:]}"
            short[t] = f"{cut}~{times[cut]}" if times[cut] else cut
            times[cut] += 1
    return short


def short_name(t: Tensor) -> str:
    """Returns the name of a tensor, shortened if a long chain of ops made it."""
    return _short_names(t._graph).get(t, t.name)
