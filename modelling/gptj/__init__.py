"""GPT-J: a decoder with rotary positions, and attention and feed-forward side by side."""

from modelling.gptj.block import Block as Block
from modelling.gptj.block import DecoderHead as DecoderHead
