"""Llama-shaped models as the scripts know them."""

from __future__ import annotations

from modelling.llama.config_json import from_config_json, normalise, to_config_json
from modelling.llama.generation import cached_model
from modelling.llama.training import llama_layout
from modelling.llama.weights import weight_table
from modelling.spec import decoder_family

FAMILY = decoder_family(
    cached_model, llama_layout, weight_table, to_config_json, from_config_json, normalise=normalise
)
