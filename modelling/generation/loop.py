"""The loop over positions: read a token, choose the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import popxl
from modelling.generation.condition import is_any
from modelling.generation.search import Search
from modelling.layers import Groups
from popxl import Tensor, ops
from popxl_addons import BoundGraph


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
    fixed, ir = list(start.decode.args.values()), popxl.gir()

    def advance(position: Tensor, carried: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        _, words, *rest = carried
        decode = BoundGraph(start.decode.graph, dict(zip(start.decode.args, fixed, strict=True)))
        logits, *caches = decode.call(position, words, *rest[len(state) :])
        words, parents, new = search.advance(logits, position, rest[: len(state)])
        if parents is not None:
            caches = [ops.gather(cache, parents) for cache in caches]
        return [is_any(search.unfinished(new), groups), words, *new, *caches]

    def one_position(position: Tensor, carried: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        then = ir.create_graph(advance, position, carried, fixed)
        otherwise = ir.create_graph(lambda carried: carried, carried)
        new = ops.conditional(carried[0], then, otherwise, [position, *carried, *fixed], carried)
        return [position + 1, *new]

    begin = popxl.constant(0, popxl.int32, "first_position")
    loop = ir.create_graph(one_position, begin, carried, fixed)
    _, _, _, *left = ops.repeat(loop, length, begin, *carried, *fixed)
    return search.tokens(left[: len(state)])
