"""Modules that the model families share, and what they need.

Activations are (batch, sequence, hidden), the same on all replicas of a tensor-parallel group.
Between `Groups.copy_to_tp` and `Groups.reduce_from_tp` each replica has its part of the features.
"""

from modelling.layers.activations import activation as activation
from modelling.layers.attention import Attention as Attention
from modelling.layers.attention import Scores as Scores
from modelling.layers.attention import heads_first as heads_first
from modelling.layers.attention import merge_heads as merge_heads
from modelling.layers.attention import places_in_texts as places_in_texts
from modelling.layers.attention import split_heads as split_heads
from modelling.layers.axes import Axes as Axes
from modelling.layers.context import Context as Context
from modelling.layers.dropout import Dropout as Dropout
from modelling.layers.embedding import Embeddings as Embeddings
from modelling.layers.embedding import VocabularyEmbedding as VocabularyEmbedding
from modelling.layers.encoder_decoder import CrossAttention as CrossAttention
from modelling.layers.encoder_decoder import DecoderContext as DecoderContext
from modelling.layers.encoder_decoder import PositionBias as PositionBias
from modelling.layers.encoder_decoder import StackContext as StackContext
from modelling.layers.experts import ExpertGroup as ExpertGroup
from modelling.layers.experts import ExpertNames as ExpertNames
from modelling.layers.experts import Experts as Experts
from modelling.layers.experts import ExpertUsage as ExpertUsage
from modelling.layers.experts import MoE as MoE
from modelling.layers.experts import Router as Router
from modelling.layers.kinds import Layers as Layers
from modelling.layers.linear import Fused as Fused
from modelling.layers.linear import Linear as Linear
from modelling.layers.lm_head import LMHead as LMHead
from modelling.layers.lm_head_loss import SUMS as SUMS
from modelling.layers.lm_head_loss import USAGE as USAGE
from modelling.layers.lm_head_loss import LMHeadLoss as LMHeadLoss
from modelling.layers.lora import LayerAdapters as LayerAdapters
from modelling.layers.lora import seed_adapters as seed_adapters
from modelling.layers.masking import MASKED as MASKED
from modelling.layers.masking import converted_mask as converted_mask
from modelling.layers.masking import padding_bias as padding_bias
from modelling.layers.masking import segment_bias as segment_bias
from modelling.layers.module import Module as Module
from modelling.layers.module import cast as cast
from modelling.layers.module import parameter as parameter
from modelling.layers.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from modelling.layers.norm import LayerNorm as LayerNorm
from modelling.layers.norm import RMSNorm as RMSNorm
from modelling.layers.norm import ShardedRMSNorm as ShardedRMSNorm
from modelling.layers.parallel import Groups as Groups
from modelling.layers.residual import add_residual as add_residual
from modelling.layers.rotary import Tables as Tables
from modelling.layers.rotary import constant_tables as constant_tables
from modelling.layers.rotary import rotate_halves as rotate_halves
from modelling.layers.rotary import tables_at as tables_at
from modelling.layers.rotary import tables_of_texts as tables_of_texts
from modelling.layers.run_config import configured as configured
from modelling.layers.run_config import run_config as run_config
