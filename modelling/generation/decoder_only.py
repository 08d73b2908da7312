"""Generation layer by layer, for decoder-only families; `cached.py` explains the caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import popxl
from modelling.generation.cached import CachedModel
from modelling.generation.caches import Slots, continued
from modelling.generation.passes import Pass, PhaseWeights, Stack, head_stack
from modelling.generation.prompts import last_words, what_was_read
from modelling.generation.rows import repeated
from modelling.generation.search import SpecialTokens
from modelling.generation.streamed import At, Begun, StreamedOf
from modelling.layers import LMHeadLoss
from modelling.phases.buffers import Port
from modelling.phases.settings import Settings
from popxl import Tensor, TensorSpec
from popxl_addons import Module

LAYER = "layer"


class Reading(Module):
    """A layer that reads prompts, for `copies` sequences each."""

    def __init__(self, layer: Module, slots: Slots, copies: int) -> None:
        super().__init__()
        self.layer, self.slots, self.copies = layer, slots, copies

    def build(self, x: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """x: (batch, length, hidden) -> the same shape, and each sequence's caches."""
        x, *caches = self.layer(x, last, self.slots)
        return x, *(repeated(cache, self.copies) for cache in caches)


class Writing(Module):
    """A layer that reads one token of each sequence."""

    def __init__(self, model: CachedModel, kind: int, copies: int) -> None:
        super().__init__()
        self.layer, self.copies = model.token.kinds[kind], copies
        self._model, self._kind = model, kind

    def build(
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        parents: Sequence[Tensor],
        last: Tensor,
        position: Tensor,
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and the caches with this position.

        Args:
            parents: see `continued`.
            last: of the prompts, see `Slots`.
        """
        at = self._model.at(self._kind, position, repeated(last, self.copies))
        return self.layer(x, continued(caches, parents), *at)


class DecoderOnlyStreams:
    """A `StreamedGenerator` of a model with the phases embeddings, layer and head."""

    prompts_per_sample = 1
    x: Port

    def __init__(self, settings: Settings, sequences: int, model: CachedModel) -> None:
        """
        Args:
            sequences: decoded for each prompt.
        """
        given: Any = settings.config.model  # a decoder alone has an output_length and tokens
        self._settings, self._copies, self._model = settings, sequences, model
        self.prompt_length, self.output_length = given.sequence_length, given.output_length
        self.special = SpecialTokens.of(given)
        self.sequences = settings.config.execution.micro_batch_size * sequences
        self.stacks: list[Stack] = []

    # ---- the passes -----------------------------------------------------------------------------
    def begin(self, words: Tensor, mask: Tensor) -> Begun:
        """See `StreamedGenerator`."""
        first, last, prompted = last_words(words, mask)
        first = repeated(first, self._copies)
        return Begun(prompted, first, what_was_read(words, mask), [last])

    def connect(self, at: At) -> None:
        """See `StreamedGenerator`."""
        settings, layers = self._settings, self._settings.config.model.layers
        self._prompts = Pass(self._model.embeddings(), [at.words], settings)
        (x,) = self._prompts.outputs
        self._tokens = Pass(self._model.embeddings(), [at.next_words], settings)
        (self.x,) = self._tokens.outputs
        kinds = range(len(self._model.slots))
        self._read = [self._reading(kind, x, at) for kind in kinds]
        self._write = [self._writing(kind, at) for kind in kinds]
        facts = [p.facts for p in (*self._read, *self._write)]
        self._embeddings = PhaseWeights("embeddings", [self._prompts.facts], settings)
        self._layers = PhaseWeights("layer", facts, settings, layers)
        self.stacks = [Stack(self._embeddings), Stack(self._layers)]

    def _reading(self, kind: int, x: Port, at: At) -> Pass:
        """The pass of layers of a kind over the prompts; each has caches of its own."""
        model = self._model
        module = Reading(model.prompt.kinds[kind], model.slots[kind], self._copies)
        rows = model.prompt.order.count(kind)
        return Pass(module, [x, *at.facts], self._settings, stores=[x], rows=rows, part=LAYER)

    def _writing(self, kind: int, at: At) -> Pass:
        model, caches = self._model, self._read[kind].outputs[1:]
        return Pass(
            Writing(model, kind, self._copies),
            [self.x, caches, at.parents, *at.facts],
            self._settings,
            same=[TensorSpec((), popxl.int32)],
            stores=[self.x, *caches],
            rows=model.token.order.count(kind),
            part=LAYER,
        )

    def head(self) -> LMHeadLoss:
        """See `StreamedGenerator`."""
        return self._model.head

    def head_stack(self, choose: Pass) -> Stack:
        """See `StreamedGenerator`."""
        return head_stack(choose, self._embeddings, self._settings)

    # ---- running --------------------------------------------------------------------------------
    def read(self) -> list[Tensor]:
        """See `StreamedGenerator`."""
        with popxl.plan.part("embeddings/prompt"):
            self.stacks[0].run(self._prompts)
        with popxl.plan.part("layer/prompt"):
            self._through_layers(self._read)
        return []

    def step(self, position: Tensor, same: Sequence[Tensor]) -> None:
        """See `StreamedGenerator`."""
        with popxl.plan.part("embeddings/token"):
            self.stacks[0].run(self._tokens)
        with popxl.plan.part("layer/token"):
            self._through_layers(self._write, position)

    def _through_layers(self, passes: Sequence[Pass], *same: Tensor) -> None:
        """Let all micro-batches pass through all layers, each by the pass of its kind."""
        done = [0] * len(passes)
        for kind, rows in self._model.prompt.runs():
            self._layers.run(passes[kind], rows, done[kind], *same)
            done[kind] += len(rows)


def streamed_of(model_of: Callable[[Any], CachedModel]) -> StreamedOf:
    """The record's `streamed` of a family with such models."""

    def made(settings: Settings, sequences: int) -> DecoderOnlyStreams:
        return DecoderOnlyStreams(settings, sequences, model_of(settings.config))

    return made
