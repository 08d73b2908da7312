"""GPT-J as the scripts know it."""

from __future__ import annotations

from modelling.gptj.config_json import from_config_json, to_config_json
from modelling.gptj.generation import cached_model
from modelling.gptj.training import gptj_layout
from modelling.gptj.weights import weight_table
from modelling.spec import decoder_family

FAMILY = decoder_family(cached_model, gptj_layout, weight_table, to_config_json, from_config_json)
