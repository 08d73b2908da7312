"""Generation with GPT-J layer by layer. `modelling.generation.cached` explains slots."""

from __future__ import annotations

from collections.abc import Sequence

from config.gptj import GPTJConfig
from modelling.generation import SpecialTokens, repeated
from modelling.generation.cached import angles_at, positions_of_slots
from modelling.generation.caches import continued
from modelling.generation.decoder_only import DecoderOnlyStreams
from modelling.gptj.attention import rotary_tables
from modelling.gptj.ends import DecoderHead
from modelling.gptj.generation import PromptBlock, TokenBlock
from modelling.phases.settings import Settings
from popxl import Tensor
from popxl_addons import Module


class Reading(PromptBlock):
    """A layer that reads prompts, for `copies` sequences each."""

    def __init__(self, config: GPTJConfig, copies: int) -> None:
        super().__init__(config)
        self.copies = copies

    def build(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """x: (batch, length, hidden) -> the same shape, and each sequence's caches."""
        x, *caches = super().build(x)
        return x, *(repeated(cache, self.copies) for cache in caches)


class Writing(TokenBlock):
    """A layer that reads one token of each sequence."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__(config)
        self.model = config.model

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        parents: Sequence[Tensor],
        facts: Sequence[Tensor],
        position: Tensor,
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and the caches with this position.

        Args:
            facts: `first` and `slots` of `DecoderOnlyStep.build`.
        """
        first, slots = facts
        at, tables = first + position, rotary_tables(self.model, slots.shape[-1])
        places, slot = [at.reshape((-1, 1)), slots], position + self.model.sequence_length
        caches = continued(caches, parents)
        return super().build(x, caches, slot, places, angles_at(tables, at))


class GPTJStreams(DecoderOnlyStreams):
    """See `modelling.generation.streamed.StreamedGenerator`."""

    def __init__(self, settings: Settings, sequences: int) -> None:
        assert isinstance(settings.config, GPTJConfig)
        self._config = settings.config
        super().__init__(settings, sequences, self._config.model.output_length)

    @property
    def special(self) -> SpecialTokens:
        return SpecialTokens(self._config.model.end_token, self._config.model.pad_token)

    def facts_of(self, last: Tensor) -> list[Tensor]:
        return [last, positions_of_slots(last, self.prompt_length, self.output_length)]

    def reading(self) -> Module:
        return Reading(self._config, self.copies)

    def writing(self) -> Module:
        return Writing(self._config)

    def head(self) -> DecoderHead:
        return DecoderHead(self._config)
