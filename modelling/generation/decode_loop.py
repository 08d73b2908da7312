"""The decoding loop: run the model on one token, choose the next one."""

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
    """Prefill results from which the decoding loop starts: caches, first tokens, prompts.

    Attributes:
        decode: graph that reads one token. Inputs that are not bound: position (int32 scalar, from
            0), input_ids (int32 (sequences, 1), the tokens at that position), the caches. Outputs:
            logits of the next token (see `Search.advance`), the updated caches.
        caches: initial caches of `decode`, (sequences, ...) each.
        first_tokens: int32 (sequences, 1), the tokens read at the first position.
        has_prompt: bool (prompts,), false for rows that only fill up the batch.
        prompt_tokens: see `Search.start`.
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
    """Generate `length` tokens for each prompt: int32 (prompts, length), see `Search.tokens`.

    Once the search has finished all prompts of all replicas, the remaining positions cost nothing.

    Args:
        inputs: see `Search.start`.
    """
    state = search.start(start.has_prompt, start.prompt_tokens, inputs)
    loop_state = [
        any_prompt(search.unfinished(state), groups),
        start.first_tokens,
        *state,
        *start.caches,
    ]
    first = popxl.constant(0, popxl.int32, "first_position")
    _, _, _, *final = decode_more(
        start.decode, first, loop_state, len(state), length, search, groups
    )
    return search.tokens(final[: len(state)])


def decode_more(
    decode: BoundGraph,
    position: Tensor,
    loop_state: Sequence[Tensor],
    num_states: int,
    count: int,
    search: Search,
    groups: ParallelGroups,
) -> tuple[Tensor, ...]:
    """Continue the decoding loop by `count` more tokens of each sequence.

    Args:
        decode: see `DecodeStart`.
        position: position of the next token, int32 scalar.
        loop_state: a flag that is true if a prompt needs more tokens, bool scalar; the tokens to
            read; the search's state; the caches.
        num_states: number of tensors of the search's state.

    Returns:
        The next position and the updated `loop_state`.
    """
    loop_constants, ir = list(decode.args.values()), popxl.gir()

    def advance(
        position: Tensor, loop_state: list[Tensor], loop_constants: list[Tensor]
    ) -> list[Tensor]:
        _, input_ids, *state_and_caches = loop_state
        bound = BoundGraph(decode.graph, dict(zip(decode.args, loop_constants, strict=True)))
        logits, *caches = bound.call(position, input_ids, *state_and_caches[num_states:])
        input_ids, beam_idx, new = search.advance(logits, position, state_and_caches[:num_states])
        if beam_idx is not None:
            caches = [ops.gather(cache, beam_idx) for cache in caches]
        return [any_prompt(search.unfinished(new), groups), input_ids, *new, *caches]

    def one_position(
        position: Tensor, loop_state: list[Tensor], loop_constants: list[Tensor]
    ) -> list[Tensor]:
        then = ir.create_graph(advance, position, loop_state, loop_constants)
        otherwise = ir.create_graph(lambda loop_state: loop_state, loop_state)
        new = ops.conditional(
            loop_state[0], then, otherwise, [position, *loop_state, *loop_constants], loop_state
        )
        return [position + 1, *new]

    loop = ir.create_graph(one_position, position, [*loop_state], loop_constants)
    return ops.repeat(loop, count, position, *loop_state, *loop_constants)
