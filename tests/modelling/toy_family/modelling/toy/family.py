"""The toy family as the scripts know it."""

from __future__ import annotations

from data.causal_lm import CAUSAL_LM
from modelling.spec import ModelFamily
from modelling.toy.config_json import from_config_json, to_config_json
from modelling.toy.generation import ToyGenerator
from modelling.toy.training import toy_layout
from modelling.toy.weights import weight_table

FAMILY = ModelFamily(
    sample_format=CAUSAL_LM,
    layout=toy_layout,
    generator=ToyGenerator,
    weights=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
)
