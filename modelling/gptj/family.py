"""GPT-J as the scripts know it."""

from __future__ import annotations

from data.streams import STREAMS
from modelling.gptj.config_json import from_config_json, to_config_json
from modelling.gptj.generation import GPTJGenerator
from modelling.gptj.streamed import GPTJStreams
from modelling.gptj.training import gptj_layout
from modelling.gptj.weights import weight_table
from modelling.spec import ModelFamily

FAMILY = ModelFamily(
    shape=STREAMS,
    layout=gptj_layout,
    generator=GPTJGenerator,
    weights=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
    streamed=GPTJStreams,
)
