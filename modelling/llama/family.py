"""Llama-shaped models as the scripts know them."""

from __future__ import annotations

from data.streams import STREAMS
from modelling.llama.config_json import from_config_json, same_form, to_config_json
from modelling.llama.generation import LlamaGenerator
from modelling.llama.training import llama_layout
from modelling.llama.weights import weight_table
from modelling.spec import ModelFamily

FAMILY = ModelFamily(
    shape=STREAMS,
    layout=llama_layout,
    generator=LlamaGenerator,
    weights=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
    same_form=same_form,
)
