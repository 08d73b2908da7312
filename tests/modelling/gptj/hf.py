"""Hugging Face's GPT-J with random weights, as the reference."""

from __future__ import annotations

import torch
import transformers

from config.gptj import GPTJConfig
from config.presets import load_config
from tests.modelling.torch_training import ADAMW, execution

VOCABULARY, END, PAD = 61, 1, 2  # tensor parallelism pads the last shard


def small_config(
    dp: int = 1, tp: int = 1, micro_batch: int = 4, slices: int = 1, **model: object
) -> GPTJConfig:
    """A tiny GPT-J: global batch 16, everything sharded that can be."""
    small = {"layers": 3, "hidden_size": 32, "sequence_length": 12}
    small |= {"eos_token_id": END, "pad_token_id": PAD, "embedding": {"vocab_size": VOCABULARY}}
    small |= {"attention": {"heads": 4, "rotary_dim": 4}}
    return load_config(
        GPTJConfig,
        "finetuning",
        "gptj_tiny",
        {
            "model": small | model,
            "training": {"global_batch_size": 16, "optimizer": ADAMW},
            "execution": execution(dp, tp, micro_batch, slices),
        },
    )


def hf_model(config: GPTJConfig, seed: int = 0) -> transformers.GPTJForCausalLM:
    """The configured model in float32, without dropout, with weights that all matter."""
    torch.manual_seed(seed)
    model = config.model
    hf = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=model.embedding.vocab_size,
            n_positions=64,
            n_embd=model.hidden_size,
            n_layer=model.layers,
            n_head=model.attention.heads,
            rotary_dim=model.attention.rotary_dim,
            layer_norm_epsilon=model.layer_norm_epsilon,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=model.eos_token_id,
            eos_token_id=model.eos_token_id,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for parameter in hf.parameters():  # norms are not 1, biases not 0
            parameter += 0.15 * torch.randn_like(parameter)
    return hf
