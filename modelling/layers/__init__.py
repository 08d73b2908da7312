"""Layers that the model families share.

Activations are (batch, length, hidden), equal on all replicas of a tensor-parallel group. Between
`ParallelGroups.copy_to_tp` and `ParallelGroups.reduce_from_tp` each replica has a shard of the
heads or of the feed-forward features.
"""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from modelling.layers.activation_layout import ActivationLayout as ActivationLayout
    from modelling.layers.activations import get_activation as get_activation
    from modelling.layers.attention import Attention as Attention
    from modelling.layers.attention import AttentionSpec as AttentionSpec
    from modelling.layers.attention import merge_heads as merge_heads
    from modelling.layers.attention import packed_qk_ids as packed_qk_ids
    from modelling.layers.attention import split_heads as split_heads
    from modelling.layers.attention import transpose_heads as transpose_heads
    from modelling.layers.block_context import BlockContext as BlockContext
    from modelling.layers.block_context import add_residual as add_residual
    from modelling.layers.dropout import Dropout as Dropout
    from modelling.layers.embedding import Embeddings as Embeddings
    from modelling.layers.embedding import VocabularyEmbedding as VocabularyEmbedding
    from modelling.layers.encoder_decoder import CrossAttention as CrossAttention
    from modelling.layers.encoder_decoder import DecoderContext as DecoderContext
    from modelling.layers.encoder_decoder import EncoderFinalNorm as EncoderFinalNorm
    from modelling.layers.encoder_decoder import PositionBias as PositionBias
    from modelling.layers.encoder_decoder import StackContext as StackContext
    from modelling.layers.experts import ExpertGroup as ExpertGroup
    from modelling.layers.experts import Experts as Experts
    from modelling.layers.experts import ExpertUsage as ExpertUsage
    from modelling.layers.experts import ExpertWeightNames as ExpertWeightNames
    from modelling.layers.experts import MoE as MoE
    from modelling.layers.experts import Router as Router
    from modelling.layers.gated_mlp import GatedMLP as GatedMLP
    from modelling.layers.head_loss import EXPERT_USAGE as EXPERT_USAGE
    from modelling.layers.head_loss import LOSS_STATS as LOSS_STATS
    from modelling.layers.head_loss import HeadLoss as HeadLoss
    from modelling.layers.layer_modules import LayerModules as LayerModules
    from modelling.layers.linear import FusedLinear as FusedLinear
    from modelling.layers.linear import Linear as Linear
    from modelling.layers.lm_head import LMHead as LMHead
    from modelling.layers.lm_head_loss import LMHeadLoss as LMHeadLoss
    from modelling.layers.lora import LayerAdapters as LayerAdapters
    from modelling.layers.lora import seed_adapters as seed_adapters
    from modelling.layers.masking import MASK_VALUE as MASK_VALUE
    from modelling.layers.masking import invert_mask as invert_mask
    from modelling.layers.masking import padding_bias as padding_bias
    from modelling.layers.masking import segment_bias as segment_bias
    from modelling.layers.module import Module as Module
    from modelling.layers.module import cast_if_needed as cast_if_needed
    from modelling.layers.module import parameter as parameter
    from modelling.layers.multi_head_attention import MultiHeadAttention as MultiHeadAttention
    from modelling.layers.norm import LayerNorm as LayerNorm
    from modelling.layers.norm import RMSNorm as RMSNorm
    from modelling.layers.norm import ShardedRMSNorm as ShardedRMSNorm
    from modelling.layers.output_layer import PooledHeadLoss as PooledHeadLoss
    from modelling.layers.output_layer import ReplicatedLinear as ReplicatedLinear
    from modelling.layers.output_layer import as_lm_head as as_lm_head
    from modelling.layers.output_layer import make_output_layer as make_output_layer
    from modelling.layers.parallel import ParallelGroups as ParallelGroups
    from modelling.layers.rotary import RopeTables as RopeTables
    from modelling.layers.rotary import apply_rotary_pos_emb as apply_rotary_pos_emb
    from modelling.layers.rotary import constant_rope_tables as constant_rope_tables
    from modelling.layers.rotary import gather_rope_tables as gather_rope_tables
    from modelling.layers.rotary import packed_rope_tables as packed_rope_tables
    from modelling.layers.run_config import current_run_config as current_run_config
    from modelling.layers.run_config import use_run_config as use_run_config
else:
    lazy_exports(__name__)
