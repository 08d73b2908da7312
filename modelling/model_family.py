"""Model families: one record per family with all functions that the scripts call for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from config.families import FAMILIES
from config.sections import RunConfig
from data.sample_format import SampleFormat
from files.json_files import JsonObject
from modelling.layers import HeadLoss, LayerAdapters
from modelling.phases.phase_plan import PhasePlan
from modelling.phases.settings import PhaseSettings
from modelling.weights import WeightMap

if TYPE_CHECKING:
    from modelling.decoder import DecoderSpec
    from modelling.encoder_decoder import EncoderDecoderSpec
    from modelling.generation.generator import Generator, GeneratorFactory


@dataclass(frozen=True)
class ModelFamily:
    """The functions of a model family, such as T5 or Llama: conversions, programs and weight map.

    Attributes:
        sample_format: of its data: `data.seq2seq.SEQ2SEQ` or `data.causal_lm.CAUSAL_LM`.
        build_phases: builds the phases of training in the current Ir.
        build_head: builds a configuration's output layer, inside `use_run_config`.
        generator: returns the generator of a configuration, for a number of sequences per prompt.
        base_weight_map: returns the weight map of a configuration, without adapters.
        config_json: module of the conversions of its config.json: `to_config_json`,
            `from_config_json` and, where one can be written in several ways,
            `normalize_config_json`. A training start from random weights does not import it.
        infers_tied_head: True if a config.json can leave open whether the head is the embedding: it
            is if the files have no other.
        classifier_prefix: what precedes the names of the language model's weights in a classifier.
    """

    sample_format: SampleFormat
    build_phases: Callable[[PhaseSettings], PhasePlan]
    build_head: Callable[[Any], HeadLoss]
    generator: GeneratorFactory
    base_weight_map: Callable[[Any], WeightMap]
    config_json: str
    infers_tied_head: bool = False
    classifier_prefix: str = ""

    def to_config_json(self, config: Any) -> dict[str, Any]:
        """Returns the content of config.json for a configuration."""
        written: dict[str, Any] = import_module(self.config_json).to_config_json(config)
        return written

    def from_config_json(self, hf_config: JsonObject) -> dict[str, Any]:
        """Returns the fields of the model section that a config.json says.

        Raises:
            ConfigError: the family does not have the model.
        """
        fields: dict[str, Any] = import_module(self.config_json).from_config_json(hf_config)
        return fields

    def normalize_config_json(self, config: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Returns a configuration's config.json in the form that `to_config_json` writes."""
        normalize = getattr(import_module(self.config_json), "normalize_config_json", None)
        return hf_config if normalize is None else normalize(config, hf_config)

    def weight_map(self, config: RunConfig) -> WeightMap:
        """Returns a configuration's weight map, with adapters and trainable weights marked.

        Raises:
            ConfigError: see `add_adapters` and `mark_trainable`.
        """
        weight_map = self.base_weight_map(config)
        if not _selects_weights(config):
            return weight_map
        from modelling.weights.lora import add_adapters, add_trainable_tokens
        from modelling.weights.trainable import (
            check_quantized_frozen,
            mark_trainable,
            split_phases_by_trainable,
        )

        weight_map = add_adapters(weight_map, config.adapter, config.adapter_targets)
        weight_map = add_trainable_tokens(mark_trainable(weight_map, config.training), config)
        if config.model.quantization is not None and not config.model.eval:
            check_quantized_frozen(weight_map)
        return split_phases_by_trainable(weight_map) if config.has_frozen_weights else weight_map


def _selects_weights(config: RunConfig) -> bool:
    """Returns True if a configuration has adapters, frozen or quantized weights, or new tokens."""
    model, adapter = config.model, config.adapter
    given = adapter.trainable_tokens, model.new_rows, model.quantization
    return config.has_frozen_weights or any(value is not None for value in given)


def decoder_family(
    make_spec: Callable[[Any], DecoderSpec],
    config_json: str,
    **fields: Any,
) -> ModelFamily:
    """Returns the `ModelFamily` record of decoder-only models.

    Args:
        make_spec: returns the specification of a configured model.
        config_json: see `ModelFamily`.
        fields: further fields of the record.
    """
    # A start imports what its own family and program need.
    from data.causal_lm import CAUSAL_LM
    from modelling.decoder import decoder_weight_map
    from modelling.phases.decoder_only import build_decoder_only_phases

    def make_generator(*args: Any) -> Generator:
        from modelling.generation.decoder_only import DecoderOnlyGenerator

        return DecoderOnlyGenerator(*args)

    return _family_of_specs(
        make_spec,
        decoder_weight_map,
        build_decoder_only_phases,
        make_generator,
        sample_format=CAUSAL_LM,
        config_json=config_json,
        **fields,
    )


def encoder_decoder_family(
    make_spec: Callable[[Any], EncoderDecoderSpec],
    config_json: str,
    **fields: Any,
) -> ModelFamily:
    """Returns the `ModelFamily` record of encoder-decoders; arguments as for `decoder_family`."""
    from data.seq2seq import SEQ2SEQ
    from modelling.encoder_decoder import encoder_decoder_weight_map
    from modelling.phases.encoder_decoder import build_encoder_decoder_phases, build_encoder_phases

    def build_phases(settings: PhaseSettings, *args: Any) -> PhasePlan:
        has_decoder = settings.config.training.head != "none"
        build = build_encoder_decoder_phases if has_decoder else build_encoder_phases
        return build(settings, *args)

    def make_generator(*args: Any) -> Generator:
        from modelling.generation.encoder_decoder import EncoderDecoderGenerator

        return EncoderDecoderGenerator(*args)

    return _family_of_specs(
        make_spec,
        encoder_decoder_weight_map,
        build_phases,
        make_generator,
        sample_format=SEQ2SEQ,
        config_json=config_json,
        **fields,
    )


def _family_of_specs(
    make_spec: Callable[[Any], Any],
    make_weight_map: Callable[[RunConfig, Any], WeightMap],
    build_phases: Callable[..., PhasePlan],
    make_generator: Callable[..., Generator],
    **fields: Any,
) -> ModelFamily:
    """Returns the `ModelFamily` record of models whose programs follow from a specification.

    Args:
        make_weight_map: takes a configuration and its specification.
        build_phases: takes settings, the specification and the adapters.
        make_generator: takes a configuration, both of these, and the sequences per prompt.
    """

    def base_weight_map(config: Any) -> WeightMap:
        return make_weight_map(config, make_spec(config))

    def spec_and_adapters(config: Any) -> tuple[Any, LayerAdapters]:
        return make_spec(config), LayerAdapters(config, base_weight_map)

    def build_head(config: Any) -> HeadLoss:
        spec, adapters = spec_and_adapters(config)
        return adapters.attach_to_head(spec.head(), spec.token_embedding_layer)

    def generator(config: RunConfig, sequences: int) -> Generator:
        config.check_generates_text()
        return make_generator(config, *spec_and_adapters(config), sequences)

    return ModelFamily(
        build_phases=lambda s: build_phases(s, *spec_and_adapters(s.config)),
        build_head=build_head,
        generator=generator,
        base_weight_map=base_weight_map,
        **fields,
    )


def get_family(config: RunConfig) -> ModelFamily:
    """Returns the `ModelFamily` record of a configuration."""
    return load_family(config.family)


def load_family(name: str) -> ModelFamily:
    """Imports the `ModelFamily` record that `config.families.FAMILIES` registers under a name."""
    family: ModelFamily = import_module(FAMILIES[name].record).FAMILY
    return family
