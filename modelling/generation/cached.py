"""Generation with decoder-only models: read the prompts once, then decode with key/value caches.

Prompts are padded on the right and have different lengths. `Slots` says where keys and values are
kept. Attention goes by positions; slots with padding have one beyond any query's.

The loop reads the last token of a prompt as its first one. So all positions work alike: read a
token, choose the next. Reading the prompts needs no head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import popxl
from config.sections import RunConfig
from modelling.generation.caches import Slots, put
from modelling.generation.condition import call_if, is_any
from modelling.generation.loop import Start, bind_step
from modelling.generation.program import GeneratorOf
from modelling.generation.prompts import last_words, what_was_read
from modelling.generation.rows import repeated
from modelling.generation.search import SpecialTokens
from modelling.generation.stack import Inputs, Stack
from modelling.generation.step import Step
from modelling.layers import Embeddings, Groups, Layers, LMHeadLoss, Tables, tables_at
from popxl import Tensor, TensorSpec
from popxl_addons import Module, NamedTensors


# ---- layers -------------------------------------------------------------------------------------
class Prefill:
    """Makes a family's layer read prompts. To be put before it among the bases of a class.

    The layer has `attention` with `read`, and `around(x, attend)`, which is the layer with another
    attention.
    """

    def build(self, x: Tensor, last: Tensor, slots: Slots) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> the same shape, and caches: keys and values.

        Args:
            last: see `Slots`.
        """
        caches: list[Tensor] = []

        def attend(opened: Tensor) -> Tensor:
            attended, *found = self.attention.read(opened)  # type: ignore[attr-defined]
            caches.extend(slots.begin(t, last) for t in found)
            return attended

        return self.around(x, attend), *caches  # type: ignore[attr-defined]


class Decode:
    """Makes a family's layer read the token at one position; see `Prefill`."""

    def build(
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        slot: Tensor,
        places: Sequence[Tensor],
        tables: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """x: (batch, 1, hidden) -> the same shape, and `caches` with this position's key and value.

        Args:
            caches: keys and values, (batch, heads, slots, head_size) each.
            slot: of this position in the caches, int32 scalar.
            places: positions of the queries and of all slots, int32 (batch, 1) and (batch, slots).
            tables: angles of the positions, see `tables_at`; none if there are none.
        """
        attention = self.attention  # type: ignore[attr-defined]
        updated: list[Tensor] = []

        def attend(opened: Tensor) -> Tensor:
            query, *new = attention.project(opened, tuple(tables) or None)
            updated.extend(put(caches, slot, new))
            return attention.merge(attention.attend(query, *updated, places=places))

        return self.around(x, attend), *updated  # type: ignore[attr-defined]


@dataclass(frozen=True)
class CachedModel:
    """What a family gives to generate with.

    Attributes:
        prompt: its layers, reading prompts.
        token: its layers, at one position.
        head: its end.
        embeddings: its beginning, made anew at each call.
        tables: the angles of positions 0, 1, ... for a kind of layer and a number of positions;
            None: they have none.
        slots: of each kind of layer.
    """

    prompt: Layers
    token: Layers
    head: LMHeadLoss
    embeddings: Callable[[], Embeddings]
    tables: Callable[[int, int], Tables | None]
    slots: Sequence[Slots]

    def at(self, kind: int, position: Tensor, last: Tensor) -> Position:
        """What layers of a kind need to know of a position; see `Slots`."""
        slots, place = self.slots[kind], last + position
        tables = self.tables(kind, slots.prompt + slots.room)
        return Position(
            slots.slot(position),
            [place.reshape((-1, 1)), slots.places(position, last)],
            [] if tables is None else list(tables_at(tables, place)),
        )


class Position(NamedTuple):
    """See `Decode.build`."""

    slot: Tensor
    places: list[Tensor]
    tables: list[Tensor]


# ---- stacks -------------------------------------------------------------------------------------
class PromptStack(Stack):
    """All layers, reading prompts."""

    def __init__(self, model: CachedModel) -> None:
        super().__init__(len(model.prompt.order))
        self.model = model

    def build(self, x: Tensor, last: Tensor, wanted: Tensor) -> list[Tensor]:
        """x: (batch, length, hidden) -> each layer's caches; zeros unless `wanted`, a bool scalar.

        Each layer is a conditional call. Otherwise XLA puts off filling the caches until all layers
        are done, and keeps their projections until then, one and a half times the caches.
        """
        layers, slots = self.model.prompt, self.model.slots
        made = [k.create_graph(x, last, s) for k, s in zip(layers.kinds, slots, strict=True)]
        caches: list[Tensor] = []
        for i, weights in enumerate(self.weights_of_layers(made[0][0])):
            block = made[layers.order[i]][1]
            x, *new = call_if(wanted, block.bind(weights), x, last)
            caches += new
        return caches


class TokenStack(PromptStack):
    """All layers at one position."""

    def build(  # type: ignore[override]
        self, x: Tensor, caches: Sequence[Tensor], at: Sequence[Position]
    ) -> tuple[Tensor, ...]:
        """See `Decode.build`; `caches` are those of all layers, `at` is for each kind."""
        layers = self.model.token

        def others(pair: slice) -> Inputs:
            return at[layers.order[pair.start // 2]]

        return self.at_one_position(layers, x, caches, others)


# ---- the model ----------------------------------------------------------------------------------
class ReadPrompts(Module):
    """From prompts to caches."""

    def __init__(self, model: CachedModel) -> None:
        super().__init__()
        self.embeddings = model.embeddings()
        self.layer = PromptStack(model)

    def build(self, words: Tensor, last: Tensor, wanted: Tensor) -> list[Tensor]:
        """words: int32 (batch, length) -> what `PromptStack` returns."""
        with popxl.plan.part("embeddings/prompt"):
            x = self.embeddings(words)
        with popxl.plan.part("layer/prompt"):
            return self.layer(x, last, wanted)


class DecoderOnlyStep(Step):
    """See `Step`."""

    def __init__(self, config: RunConfig, model: CachedModel) -> None:
        super().__init__(config, model.head, model.embeddings())
        self.model = model
        self.layer = TokenStack(model)

    def through(
        self, x: Tensor, position: Tensor, caches: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See `Step`. Fixed is `last`, see `Slots`."""
        (last,) = fixed
        at = [self.model.at(kind, position, last) for kind in range(len(self.model.slots))]
        with popxl.plan.part("layer/token"):
            return self.layer(x, caches, at)


def _with_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    return TensorSpec((rows, *spec.shape[1:]), spec.dtype)


class DecoderOnlyGenerator:
    """See `modelling.generation.Generator`."""

    def __init__(
        self, config: RunConfig, groups: Groups, cached: CachedModel, sequences: int = 1
    ) -> None:
        """Create the graphs in the current Ir. `config.model.eval` must be set."""
        model: Any = config.model  # decoder-only models have an output_length and tokens
        batch = config.execution.micro_batch_size
        self.prompt_length, self.output_length = model.sequence_length, model.output_length
        self.prompts_per_sample = 1
        self._groups, self._sequences = groups, sequences
        self.special = SpecialTokens.of(model)
        words = TensorSpec((batch, self.prompt_length), popxl.int32)
        last, wanted = TensorSpec((batch,), popxl.int32), TensorSpec((), popxl.bool)
        prompt_facts, self._read = ReadPrompts(cached).create_graph(words, last, wanted)
        self.facts, self._step = DecoderOnlyStep(config, cached).create_graph(
            TensorSpec((), popxl.int32),
            TensorSpec((batch * sequences, 1), popxl.int32),
            [_with_rows(t.spec, batch * sequences) for t in self._read.graph.outputs],
            [TensorSpec((batch * sequences,), popxl.int32)],
        )
        assert set(prompt_facts.keys_flat()) <= set(self.facts.keys_flat())

    def begin(self, weights: NamedTensors, words: Tensor, mask: Tensor) -> Start:
        """See `modelling.generation.Generator`."""
        first, last, prompted = last_words(words, mask)
        read = self._read.bind(weights).call(words, last, is_any(prompted, self._groups))
        # Each sequence gets a copy of its prompt's caches, to which it adds its own tokens.
        caches = [repeated(cache, self._sequences) for cache in read]
        first, last = repeated(first, self._sequences), repeated(last, self._sequences)
        step = bind_step(self._step, weights, len(caches), [last])
        return Start(step, caches, first, prompted, what_was_read(words, mask))


def resident_of(model_of: Callable[[Any], CachedModel]) -> GeneratorOf:
    """The record's `generator` of a family with such models."""

    def made(config: RunConfig, groups: Groups, sequences: int = 1) -> DecoderOnlyGenerator:
        return DecoderOnlyGenerator(config, groups, model_of(config), sequences)

    return made
