"""GPT-J as the scripts know it."""

from __future__ import annotations

from data.streams import STREAMS
from modelling.generation import resident_of
from modelling.generation.decoder_only import streamed_of
from modelling.gptj.config_json import from_config_json, to_config_json
from modelling.gptj.generation import cached_model
from modelling.gptj.training import gptj_layout
from modelling.gptj.weights import weight_table
from modelling.spec import ModelFamily

FAMILY = ModelFamily(
    shape=STREAMS,
    layout=gptj_layout,
    generator=resident_of(cached_model),
    weights=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
    streamed=streamed_of(cached_model),
)
