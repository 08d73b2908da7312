"""Llama-shaped models as the scripts know them."""

from __future__ import annotations

from data.streams import STREAMS
from modelling.generation import resident_of
from modelling.generation.decoder_only import streamed_of
from modelling.llama.config_json import from_config_json, same_form, to_config_json
from modelling.llama.generation import cached_model
from modelling.llama.training import llama_layout
from modelling.llama.weights import weight_table
from modelling.spec import ModelFamily

FAMILY = ModelFamily(
    shape=STREAMS,
    layout=llama_layout,
    generator=resident_of(cached_model),
    weights=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
    streamed=streamed_of(cached_model),
    same_form=same_form,
)
