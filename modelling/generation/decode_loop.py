"""The decoding loop: run the model on one token, choose the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import popxl
from modelling.generation.conditional_call import any_across_replicas
from modelling.generation.search import Search
from modelling.layers import ParallelGroups
from popxl import Tensor, ops
from popxl_addons import BoundGraph


class InitialDecodeState(NamedTuple):
    """Prefill results from which the decoding loop starts: caches, first tokens, prompts.

    Attributes:
        decode: graph that reads one token. Inputs that are not bound: position (int32 scalar, from
            0), input_ids (int32 (sequences, 1), the tokens at that position), the caches. Outputs:
            logits of the next token (see `Search.advance`), the updated caches.
        caches: initial caches of `decode`, (sequences, ...) each.
        first_tokens: int32 (sequences, 1), the tokens read at the first position.
        is_real_prompt: bool (prompts,), false for rows that only fill up the batch.
        prompt_tokens: see `Search.init_state`.
    """

    decode: BoundGraph
    caches: Sequence[Tensor]
    first_tokens: Tensor
    is_real_prompt: Tensor
    prompt_tokens: Tensor


def generate_tokens(
    initial_state: InitialDecodeState,
    length: int,
    search: Search,
    inputs: Sequence[Tensor],
    groups: ParallelGroups,
) -> Tensor:
    """Generate `length` tokens for each prompt: int32 (prompts, length), padded at the end.

    They are those of `Search.output_tokens`. Once the search has finished all prompts of all
    replicas, the remaining positions cost nothing.

    Args:
        inputs: see `Search.init_state`.
    """
    state = search.init_state(initial_state.is_real_prompt, initial_state.prompt_tokens, inputs)
    loop_state = [
        any_across_replicas(search.unfinished_prompts(state), groups),
        initial_state.first_tokens,
        *state,
        *initial_state.caches,
    ]
    first = popxl.constant(0, popxl.int32, "first_position")
    _, _, _, *final = continue_decoding(
        initial_state.decode, first, loop_state, len(state), length, search, groups
    )
    return search.output_tokens(final[: len(state)])


def continue_decoding(
    decode_graph: BoundGraph,
    position: Tensor,
    loop_state: Sequence[Tensor],
    num_states: int,
    num_tokens: int,
    search: Search,
    groups: ParallelGroups,
) -> tuple[Tensor, ...]:
    """Continue the decoding loop by `num_tokens` more tokens of each sequence.

    Args:
        decode_graph: see `InitialDecodeState`.
        position: position of the next token, int32 scalar.
        loop_state: a flag that is true if a prompt needs more tokens, bool scalar; the tokens to
            read; the search's state; the caches.
        num_states: number of tensors of the search's state.

    Returns:
        The next position and the updated `loop_state`.
    """
    loop_constants, ir = list(decode_graph.args.values()), popxl.gir()

    def decode_token(
        position: Tensor, loop_state: list[Tensor], loop_constants: list[Tensor]
    ) -> list[Tensor]:
        _, input_ids, *state_and_caches = loop_state
        bound = BoundGraph(
            decode_graph.graph, dict(zip(decode_graph.args, loop_constants, strict=True))
        )
        logits, *caches = bound.call(position, input_ids, *state_and_caches[num_states:])
        input_ids, beam_idx, new = search.advance(logits, position, state_and_caches[:num_states])
        if beam_idx is not None:
            caches = [ops.gather(cache, beam_idx) for cache in caches]
        return [
            any_across_replicas(search.unfinished_prompts(new), groups),
            input_ids,
            *new,
            *caches,
        ]

    def loop_body(
        position: Tensor, loop_state: list[Tensor], loop_constants: list[Tensor]
    ) -> list[Tensor]:
        then = ir.create_graph(decode_token, position, loop_state, loop_constants)
        otherwise = ir.create_graph(lambda loop_state: loop_state, loop_state)
        new = ops.conditional(
            loop_state[0], then, otherwise, [position, *loop_state, *loop_constants], loop_state
        )
        return [position + 1, *new]

    loop = ir.create_graph(loop_body, position, [*loop_state], loop_constants)
    return ops.repeat(loop, num_tokens, position, *loop_state, *loop_constants)
