"""The loop over positions: read a token, choose the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import popxl
from modelling.generation.condition import is_any
from modelling.layers import Groups
from popxl import Tensor, ops
from popxl_addons import BoundGraph, GraphWithNamedArgs, NamedTensors

Choice = Callable[[Tensor], Tensor]
"""A search strategy: float32 logits (batch, part of the vocabulary) -> int32 (batch,), the next
token of each sample, the same on the replicas of a tensor-parallel group."""


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens with a meaning for generation.

    Attributes:
        end: the last token of a sequence.
        pad: fills a sequence behind its end.
    """

    end: int
    pad: int


def bind_step(
    step: GraphWithNamedArgs, weights: NamedTensors, caches: int, fixed: Sequence[Tensor]
) -> BoundGraph:
    """Bind what is the same at all positions.

    Args:
        step: takes position, words, caches and `fixed`, in this order; see `decode`.
        weights: values of its variables.
        caches: how many there are.
    """
    inputs = step.graph.inputs[2 + caches :]  # behind `fixed` are the weights
    return step.bind(weights).bind(dict(zip(inputs, fixed, strict=False)))


def decode(
    step: BoundGraph,
    caches: Sequence[Tensor],
    first: Tensor,
    prompted: Tensor,
    length: int,
    choose: Choice,
    special: SpecialTokens,
    groups: Groups,
) -> Tensor:
    """Generate `length` tokens for each sample.

    When all sequences of all replicas are complete, the remaining positions cost nothing.

    Args:
        step: reads one token. Inputs that are not bound: position (int32 scalar, from 0), words
            (int32 (batch, 1), the tokens at that position), the caches. Outputs: logits for the
            next token (see `Choice`), the updated caches.
        caches: what `step` carries from one position to the next, at the start.
        first: int32 (batch, 1), the tokens read at the first position.
        prompted: bool (batch,), false for samples to leave out, which only fill up the batch.
        length: number of positions.

    Returns:
        int32 (batch, length): tokens up to and including the end token, then padding.
    """
    batch = prompted.shape[0]
    state = [
        first,
        popxl.constant([[special.pad] * length] * batch, popxl.int32, "no_tokens"),
        ops.logical_not(prompted),
    ]
    carried = [is_any(prompted, groups), *state, *caches]
    bound = list(step.args.values())
    advance = _Advance(step, choose, special, groups)
    ir = popxl.gir()

    def one_position(position: Tensor, carried: list[Tensor], bound: list[Tensor]) -> list[Tensor]:
        then = ir.create_graph(advance, position, carried, bound)
        otherwise = ir.create_graph(_unchanged, carried)
        new = ops.conditional(carried[0], then, otherwise, [position, *carried, *bound], carried)
        return [position + 1, *new]

    start = popxl.constant(0, popxl.int32, "first_position")
    loop = ir.create_graph(one_position, start, carried, bound)
    _, _, _, tokens, *_ = ops.repeat(loop, length, start, *carried, *bound)
    return tokens


@dataclass(frozen=True)
class _Advance:
    """Builds the graph of one position. See `decode`."""

    step: BoundGraph
    choose: Choice
    special: SpecialTokens
    groups: Groups

    def __call__(
        self, position: Tensor, carried: list[Tensor], bound: list[Tensor]
    ) -> list[Tensor]:
        _, words, tokens, finished, *caches = carried
        step = BoundGraph(self.step.graph, dict(zip(self.step.args, bound, strict=True)))
        logits, *caches = step.call(position, words, *caches)
        pad = popxl.constant(self.special.pad, popxl.int32, "pad")
        end = popxl.constant(self.special.end, popxl.int32, "end")
        chosen = ops.where(finished, pad, self.choose(logits))
        finished = ops.logical_or(finished, ops.equal(chosen, end))
        words = chosen.reshape(words.shape)
        tokens = ops.dynamic_update(tokens, position, words, [1], [1], no_overlap=True)
        going_on = is_any(ops.logical_not(finished), self.groups)
        return [going_on, words, tokens, finished, *caches]


def _unchanged(carried: list[Tensor]) -> list[Tensor]:
    return carried
