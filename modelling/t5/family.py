"""T5, of all its kinds, as the scripts know it."""

from __future__ import annotations

from data.seq2seq import SEQ2SEQ
from modelling.spec import ModelFamily
from modelling.t5.config_json import from_config_json, normalise, to_config_json
from modelling.t5.generation import T5Generator
from modelling.t5.table import weight_table
from modelling.t5.training import t5_layout

FAMILY = ModelFamily(
    sample_format=SEQ2SEQ,
    layout=t5_layout,
    generator=T5Generator,
    table=weight_table,
    to_config_json=to_config_json,
    from_config_json=from_config_json,
    head_in_files=True,
    normalise=normalise,
)
