"""The loop over positions: read a token, choose the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import popxl
from modelling.generation.condition import is_any
from modelling.generation.search import Search
from modelling.layers import Groups
from popxl import Tensor, ops
from popxl_addons import BoundGraph, GraphWithNamedArgs, NamedTensors


def bind_decode(
    graph: GraphWithNamedArgs, weights: NamedTensors, caches: int, fixed: Sequence[Tensor]
) -> BoundGraph:
    """Bind what is the same at all positions.

    Args:
        graph: takes position, words, caches and `fixed`, in this order; see `Prefilled`.
        weights: values of its variables.
        caches: how many there are.
    """
    inputs = graph.graph.inputs[2 + caches :]  # after `fixed` come the weights
    return graph.bind(weights).bind(dict(zip(inputs, fixed, strict=False)))


class Prefilled(NamedTuple):
    """What a model begins to write from.

    Attributes:
        decode: reads one token. Inputs that are not bound: position (int32 scalar, from 0), words
            (int32 (sequences, 1), the tokens at that position), the caches. Outputs: logits for the
            next token (see `Search.advance`), the updated caches.
        caches: what `decode` carries from one position to the next, at the start; their first axis
            is the sequences'.
        first: int32 (sequences, 1), the tokens read at the first position.
        prompted: bool (prompts,), false for those to leave out, which only fill up the batch.
        read: see `Search.start`.
    """

    decode: BoundGraph
    caches: Sequence[Tensor]
    first: Tensor
    prompted: Tensor
    read: Tensor


def write_tokens(
    start: Prefilled, length: int, search: Search, inputs: Sequence[Tensor], groups: Groups
) -> Tensor:
    """Generate `length` tokens for each prompt.

    When the search is done with all prompts of all replicas, the remaining positions cost nothing.

    Args:
        inputs: see `Search.start`.

    Returns:
        See `Search.tokens`.
    """
    state = search.start(start.prompted, start.read, inputs)
    carried = [is_any(search.unfinished(state), groups), start.first, *state, *start.caches]
    bound = list(start.decode.args.values())
    advance = _Advance(start.decode, search, groups, len(state))
    ir = popxl.gir()

    def one_position(position: Tensor, carried: list[Tensor], bound: list[Tensor]) -> list[Tensor]:
        then = ir.create_graph(advance, position, carried, bound)
        otherwise = ir.create_graph(_unchanged, carried)
        new = ops.conditional(carried[0], then, otherwise, [position, *carried, *bound], carried)
        return [position + 1, *new]

    begin = popxl.constant(0, popxl.int32, "first_position")
    loop = ir.create_graph(one_position, begin, carried, bound)
    _, _, _, *left = ops.repeat(loop, length, begin, *carried, *bound)
    return search.tokens(left[: len(state)])


@dataclass(frozen=True)
class _Advance:
    """Builds the graph of one position. See `write_tokens`."""

    decode: BoundGraph
    search: Search
    groups: Groups
    state: int
    """How many tensors the search carries."""

    def __call__(
        self, position: Tensor, carried: list[Tensor], bound: list[Tensor]
    ) -> list[Tensor]:
        _, words, *rest = carried
        state, caches = rest[: self.state], rest[self.state :]
        decode = BoundGraph(self.decode.graph, dict(zip(self.decode.args, bound, strict=True)))
        logits, *caches = decode.call(position, words, *caches)
        words, parents, state = self.search.advance(logits, position, state)
        if parents is not None:
            caches = [ops.gather(cache, parents) for cache in caches]
        return [is_any(self.search.unfinished(state), self.groups), words, *state, *caches]


def _unchanged(carried: list[Tensor]) -> list[Tensor]:
    return carried
