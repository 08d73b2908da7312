"""Hugging Face's T5 with random weights, as the reference."""

from __future__ import annotations

import torch
import transformers

from config.t5 import T5Config


def hf_model(
    config: T5Config, seed: int = 0, spread: float = 0.2
) -> transformers.T5ForConditionalGeneration:
    """The configured model in float32, without dropout, with weights that all matter.

    Args:
        spread: standard deviation of what is added to the initial weights.
    """
    torch.manual_seed(seed)
    model = config.model
    hf_config = transformers.T5Config(
        vocab_size=model.embedding.vocab_size,
        d_model=model.hidden_size,
        d_kv=model.attention.d_kv,
        d_ff=model.d_ff,
        num_layers=model.layers,
        num_heads=model.attention.heads,
        relative_attention_num_buckets=model.attention.relative_attention_num_buckets,
        relative_attention_max_distance=model.attention.relative_attention_max_distance,
        layer_norm_epsilon=model.layer_norm_epsilon,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    hf = transformers.T5ForConditionalGeneration(hf_config).eval()
    # This class ties the head to the embedding, whatever the configuration says.
    hf.lm_head.weight = torch.nn.Parameter(torch.randn_like(hf.lm_head.weight))
    with torch.no_grad():
        for parameter in hf.parameters():  # norms are not 1, biases of positions not tiny
            parameter += spread * torch.randn_like(parameter)
    return hf


def additive(visible: torch.Tensor) -> torch.Tensor:
    """Hugging Face's additive mask: 0 where `visible`, else the lowest number."""
    return torch.where(visible.bool(), 0.0, torch.finfo(torch.float32).min)
