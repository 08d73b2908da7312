"""Generation layer by layer, for decoder-only families."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from modelling.generation.passes import Pass, PhaseWeights, Stack
from modelling.generation.prompts import last_words, what_was_read
from modelling.generation.rows import repeated
from modelling.generation.search import SpecialTokens
from modelling.generation.streamed import At, Begun
from modelling.layers import Embeddings, LMHeadLoss
from modelling.phases.buffers import Port
from modelling.phases.settings import Settings
from popxl import Tensor, TensorSpec
from popxl_addons import Module


class DecoderOnlyStreams:
    """A `StreamedGenerator` of a model with the phases embeddings, layer and head.

    Subclasses say how a layer reads prompts and a token, what it needs to know of the prompts, and
    what the head is. The loop's first position reads the last token of each prompt.
    """

    prompts_per_sample = 1
    x: Port

    def __init__(self, settings: Settings, sequences: int, output_length: int) -> None:
        """
        Args:
            sequences: decoded for each prompt.
        """
        self.settings, self.copies, self.output_length = settings, sequences, output_length
        self.prompt_length = settings.config.model.sequence_length
        self.sequences = settings.config.execution.micro_batch_size * sequences
        self.stacks: list[Stack] = []

    # ---- of a family ----------------------------------------------------------------------------
    @property
    def special(self) -> SpecialTokens:
        """See `Generator`."""
        raise NotImplementedError

    def facts_of(self, last: Tensor) -> list[Tensor]:
        """What layers need to know of prompts.

        Args:
            last: position of each sequence's last word, int32 (sequences,).
        """
        raise NotImplementedError

    def reading(self) -> Module:
        """A layer that reads prompts: `build(x) -> x, caches`, those of each sequence."""
        raise NotImplementedError

    def writing(self) -> Module:
        """A layer that reads a token: `build(x, caches, parents, facts, position) -> x, caches`."""
        raise NotImplementedError

    def head(self) -> LMHeadLoss:
        """See `StreamedGenerator`."""
        raise NotImplementedError

    # ---- the passes -----------------------------------------------------------------------------
    def begin(self, words: Tensor, mask: Tensor) -> Begun:
        """See `StreamedGenerator`."""
        first, last, prompted = last_words(words, mask)
        first, last = repeated(first, self.copies), repeated(last, self.copies)
        return Begun(prompted, first, what_was_read(words, mask), self.facts_of(last))

    def connect(self, at: At) -> None:
        """See `StreamedGenerator`."""
        settings, layers = self.settings, self.settings.config.model.layers
        embeddings = Embeddings(settings.config)
        self._prompts = Pass(embeddings, [at.words], settings)
        (x,) = self._prompts.outputs
        self._read = Pass(self.reading(), [x], settings, stores=[x], rows=layers)
        caches = self._read.outputs[1:]
        self._tokens = Pass(Embeddings(settings.config), [at.next_words], settings)
        (self.x,) = self._tokens.outputs
        self._write = Pass(
            self.writing(), [self.x, caches, at.parents, at.facts], settings,
            same=[TensorSpec((), popxl.int32)], stores=[self.x, *caches], rows=layers,
        )  # fmt: skip
        embedding = PhaseWeights("embeddings", [self._prompts.facts], settings)
        layer = PhaseWeights("layer", [self._read.facts, self._write.facts], settings, layers)
        self.stacks = [Stack(embedding), Stack(layer)]

    def head_stack(self, choose: Pass) -> Stack:
        """See `StreamedGenerator`."""
        return Stack(PhaseWeights("head", [choose.facts], self.settings))

    def read(self) -> list[Tensor]:
        """See `StreamedGenerator`."""
        embeddings, layers = self.stacks
        with popxl.plan.part("embeddings/prompt"):
            embeddings.run(self._prompts)
        with popxl.plan.part("layer/prompt"):
            layers.run(self._read)
        return []

    def step(self, position: Tensor, same: Sequence[Tensor]) -> None:
        """See `StreamedGenerator`."""
        embeddings, layers = self.stacks
        with popxl.plan.part("embeddings/token"):
            embeddings.run(self._tokens)
        with popxl.plan.part("layer/token"):
            layers.run(self._write, position)
