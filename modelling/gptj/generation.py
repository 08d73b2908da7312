"""Generation with GPT-J: read the prompts once, then decode with key/value caches.

Prompts are padded on the right and have different lengths. The caches have a slot for each token
of the longest prompt, and behind them one for each token that is generated: the slot of a new token
is the same for all samples, and its position, by which it is rotated, is not. The slots of padding
between the two are hidden.

The loop reads the last token of a prompt as its first one. So all positions are alike: they read a
token and choose the next, and reading the prompts needs no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import popxl
from config.gptj import GPTJConfig, GPTJModel
from modelling.generation import (
    POSITIONS,
    Search,
    SpecialTokens,
    Stack,
    Step,
    bind_step,
    decode,
    last_words,
    put,
    repeated,
)
from modelling.generation.condition import call_if, is_any
from modelling.gptj.attention import Tables, rotary_tables, tables_at
from modelling.gptj.block import Block
from modelling.gptj.ends import DecoderHead
from modelling.layers import MASKED, Embeddings, Groups, cast
from popxl import Tensor, TensorSpec, ops
from popxl_addons import Module, NamedTensors


# ---- layers -------------------------------------------------------------------------------------
class PromptBlock(Block):
    """A layer that reads prompts."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__(config)
        self.room = config.model.output_length

    def build(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x: (batch, length, hidden) -> the same shape, and caches: keys and values of all
        positions, with room for those of what is generated."""
        opened = self.open(x)
        attended, *caches = self.attention.read(opened)
        return self.close(x, opened, attended), *map(self._with_room, caches)

    def _with_room(self, t: Tensor) -> Tensor:
        batch, heads, _, size = t.shape
        return ops.concat([t, ops.init((batch, heads, self.room, size), t.dtype)], POSITIONS)


class DecodingBlock(Block):
    """A layer at one position."""

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        slot: Tensor,
        tables: Tables,
        biases: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """x: (batch, 1, hidden) -> the same shape, and `caches` with this position's key and value.

        Args:
            caches: keys and values, (batch, heads, slots, head_size) each.
            slot: of this position in the caches, int32 scalar.
            tables: angles of each sample's position, see `tables_at`.
            biases: of the scores, float32; they hide slots.
        """
        opened = self.open(x)
        query, *new = self.attention.project(opened, tables)
        keys, values = put(caches, slot, new)
        heads = self.attention.attend(query, keys, values, biases)
        return self.close(x, opened, self.attention.merge(heads)), keys, values


# ---- stacks -------------------------------------------------------------------------------------
class PromptStack(Stack):
    """All layers, reading prompts."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__(config.model.layers)
        self.config = config

    def build(self, x: Tensor, wanted: Tensor) -> list[Tensor]:
        """x: (batch, length, hidden) -> each layer's caches; zeros unless `wanted`, a bool scalar.

        Under a condition, since XLA otherwise puts off filling the caches until all layers are
        done, and keeps the projections of all of them until then, one and a half times the caches.
        """
        facts, block = PromptBlock(self.config).create_graph(x)
        caches: list[Tensor] = []
        for weights in self.weights_of_layers(facts):
            x, *new = call_if(wanted, block.bind(weights), x)
            caches += new
        return caches


class DecodingStack(PromptStack):
    """All layers at one position."""

    def build(  # type: ignore[override]
        self, x: Tensor, caches: Sequence[Tensor], *position: Tensor | list[Tensor]
    ) -> tuple[Tensor, ...]:
        """See `DecodingBlock.build`; `caches` are those of all layers."""
        return self.at_one_position(DecodingBlock(self.config), x, caches, lambda _: position)


# ---- the model ----------------------------------------------------------------------------------
class ReadPrompts(Module):
    """From prompts to caches."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layer = PromptStack(config)

    def build(self, words: Tensor, wanted: Tensor) -> list[Tensor]:
        """words: int32 (batch, length) -> what `PromptStack` returns."""
        with popxl.plan.part("embeddings/prompt"):
            x = self.embeddings(words)
        with popxl.plan.part("layer/prompt"):
            return self.layer(x, wanted)


class GPTJStep(Step):
    """See `Step`."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__(config, DecoderHead(config))
        self.model = config.model
        self.layer = DecodingStack(config)

    def build(
        self,
        position: Tensor,
        words: Tensor,
        caches: Sequence[Tensor],
        first: Tensor,
        padding: Tensor,
    ) -> tuple[Tensor, ...]:
        """words: int32 (batch, 1) -> float32 logits (batch, part of the vocabulary), new caches.

        Args:
            position: in the loop, int32 scalar.
            first: position of each sample's first word, int32 (batch,).
            padding: bias that hides the slots behind each prompt, float32 (batch, 1, 1, slots).
        """
        at = place_of(self.model, position, first, padding)
        x = self.embedded(words)
        with popxl.plan.part("layer/token"):
            x, *caches = self.layer(x, caches, at.slot, list(at.tables), at.biases)
        return self.logits(x), *caches


class Place(NamedTuple):
    """What `DecodingBlock` needs to know of a position; see there."""

    slot: Tensor
    tables: Tables
    biases: list[Tensor]


def place_of(model: GPTJModel, position: Tensor, first: Tensor, padding: Tensor) -> Place:
    """The place of a position of the loop. Args: see `GPTJStep.build`."""
    prompt, slots = model.sequence_length, padding.shape[-1]
    tables = tables_at(rotary_tables(model, slots), first + position)
    later = np.arange(slots) > prompt + np.arange(slots - prompt)[:, None]
    hidden = popxl.constant(np.where(later, MASKED, 0), popxl.float32, "later_slots")
    biases = [padding, ops.gather(hidden, position).reshape((1, 1, 1, slots))]
    return Place(position + prompt, tables, biases)


def _with_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    return TensorSpec((rows, *spec.shape[1:]), spec.dtype)


class GPTJGenerator:
    """See `modelling.generation.Generator`."""

    def __init__(self, config: GPTJConfig, groups: Groups, sequences: int = 1) -> None:
        """Create the graphs in the current Ir. `config.model.eval` must be set."""
        model, batch = config.model, config.execution.micro_batch_size
        self.prompt_length, self.output_length = model.sequence_length, model.output_length
        self.prompts_per_sample = 1
        self._groups, self._sequences = groups, sequences
        self.special = SpecialTokens(model.end_token, model.pad_token)
        words = TensorSpec((batch, self.prompt_length), popxl.int32)
        wanted = TensorSpec((), popxl.bool)
        prompt_facts, self._read = ReadPrompts(config).create_graph(words, wanted)
        slots = self.prompt_length + self.output_length
        self.facts, self._step = GPTJStep(config).create_graph(
            TensorSpec((), popxl.int32),
            TensorSpec((batch * sequences, 1), popxl.int32),
            [_with_rows(t.spec, batch * sequences) for t in self._read.graph.outputs],
            TensorSpec((batch * sequences,), popxl.int32),
            TensorSpec((batch * sequences, 1, 1, slots), popxl.float32),
        )
        assert set(prompt_facts.keys_flat()) <= set(self.facts.keys_flat())

    def generate(
        self,
        weights: NamedTensors,
        words: Tensor,
        mask: Tensor,
        search: Search,
        inputs: Sequence[Tensor],
    ) -> Tensor:
        """See `modelling.generation.Generator`."""
        first, last, prompted = last_words(words, mask)
        read = self._read.bind(weights).call(words, is_any(prompted, self._groups))
        # Each sequence has a copy of its prompt's caches: they are one with those of its own words.
        caches = [repeated(cache, self._sequences) for cache in read]
        first, last = repeated(first, self._sequences), repeated(last, self._sequences)
        padding = padding_of(last, self.prompt_length, self.output_length)
        return decode(
            bind_step(self._step, weights, len(caches), [last, padding]),
            caches,
            first,
            prompted,
            self.output_length,
            search,
            inputs,
            self._groups,
        )


def padding_of(last: Tensor, length: int, room: int) -> Tensor:
    """The bias that hides the slots of a prompt's last word and those behind it.

    Args:
        last: position of each sequence's last word, int32 (batch,).
        length, room: slots of the prompts, and of what is generated.

    Returns:
        float32 (batch, 1, 1, length + room).
    """
    slots = length + room
    index = np.where(np.arange(slots) < length, np.arange(slots), -1).reshape(1, slots)
    behind = ops.logical_not(
        ops.greater(last.reshape((-1, 1)), popxl.constant(index, popxl.int32, "slots"))
    )
    return (cast(behind, popxl.float32) * MASKED).reshape((last.shape[0], 1, 1, slots))
