"""The loop over positions: read a token, choose the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import popxl
from modelling.generation.conditional_call import any_prompt
from modelling.generation.search import Search
from modelling.layers import ParallelGroups
from popxl import Tensor, ops
from popxl_addons import BoundGraph


class DecodeStart(NamedTuple):
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
    first_tokens: Tensor
    has_prompt: Tensor
    prompt_tokens: Tensor


def generate_tokens(
    start: DecodeStart,
    length: int,
    search: Search,
    inputs: Sequence[Tensor],
    groups: ParallelGroups,
) -> Tensor:
    """Generate `length` tokens for each prompt.

    When the search is done with all prompts of all replicas, the remaining positions cost nothing.

    Args:
        inputs: see `Search.start`.

    Returns:
        See `Search.tokens`.
    """
    state = search.start(start.has_prompt, start.prompt_tokens, inputs)
    carried = [
        any_prompt(search.unfinished(state), groups),
        start.first_tokens,
        *state,
        *start.caches,
    ]
    begin = popxl.constant(0, popxl.int32, "first_position")
    _, _, _, *left = decode_more(start.decode, begin, carried, len(state), length, search, groups)
    return search.tokens(left[: len(state)])


def decode_more(
    decode: BoundGraph,
    position: Tensor,
    carried: Sequence[Tensor],
    states: int,
    count: int,
    search: Search,
    groups: ParallelGroups,
) -> tuple[Tensor, ...]:
    """Generate so many tokens more.

    Args:
        decode: see `DecodeStart`.
        position: of the next token, int32 scalar.
        carried: whether a prompt needs tokens, bool scalar; the tokens to read, the search's
            state, and the caches.
        states: how many tensors the search's state is.

    Returns:
        Position and what is carried, after that.
    """
    fixed, ir = list(decode.args.values()), popxl.gir()

    def advance(position: Tensor, carried: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        _, input_ids, *rest = carried
        bound = BoundGraph(decode.graph, dict(zip(decode.args, fixed, strict=True)))
        logits, *caches = bound.call(position, input_ids, *rest[states:])
        input_ids, beam_idx, new = search.advance(logits, position, rest[:states])
        if beam_idx is not None:
            caches = [ops.gather(cache, beam_idx) for cache in caches]
        return [any_prompt(search.unfinished(new), groups), input_ids, *new, *caches]

    def one_position(position: Tensor, carried: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        then = ir.create_graph(advance, position, carried, fixed)
        otherwise = ir.create_graph(lambda carried: carried, carried)
        new = ops.conditional(carried[0], then, otherwise, [position, *carried, *fixed], carried)
        return [position + 1, *new]

    loop = ir.create_graph(one_position, position, [*carried], fixed)
    return ops.repeat(loop, count, position, *carried, *fixed)
