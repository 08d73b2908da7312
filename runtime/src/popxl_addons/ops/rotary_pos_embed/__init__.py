"""Rotary position embedding (RoPE)."""

from popxl_addons.ops.rotary_pos_embed.rotary_pos_embed import rotary_pos_embed as rotary_pos_embed
from popxl_addons.ops.rotary_pos_embed.rotary_pos_embed import (
    trig_table_constants as trig_table_constants,
)
from popxl_addons.ops.rotary_pos_embed.rotary_pos_embed import trig_tables as trig_tables
