"""Folders as transformers writes them, of sizes that no preset has."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from tests.data.corpora import sample_tokenizer

T5 = {
    "vocab_size": 320, "d_model": 48, "d_kv": 10, "d_ff": 40, "num_layers": 1, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 16, "relative_attention_max_distance": 40,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
GPTJ = {
    "vocab_size": 580, "n_positions": 64, "n_embd": 48, "n_layer": 1, "n_head": 3, "rotary_dim": 6,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TEXT = {
    "vocab_size": 580, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
QWEN3 = TEXT | {"tie_word_embeddings": True}
KINDS = {
    # model, and whose tokenizer it has; "2019" is the T5 of that year
    "t5": ("T5", T5, "t5"),
    "2019": ("T5", {**T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}, "t5"),
    "v1.1, tied": ("T5", T5, "t5"),
    "mt5": ("MT5", T5, "t5"),
    "mt5, tied": ("MT5", T5, "t5"),
    "gptj": ("GPTJ", GPTJ, "gptj"),
    "qwen3": ("Qwen3", QWEN3, "gptj"),
}


def save(kind: str, folder, shards: str = "30KB"):
    """A model with random weights and its tokenizer, in several files."""
    torch.manual_seed(1)
    name, settings, tokenizer = KINDS[kind]
    end = "ForConditionalGeneration" if name.endswith("T5") else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}{end}")(config)
    if kind in ("t5", "mt5"):
        # These classes tie the head to the embedding, whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder, max_shard_size=shards)
    sample_tokenizer(tokenizer).save_pretrained(folder)
    return model


def save_bin(kind: str, folder: Path, files: int = 1, dtype: torch.dtype = torch.float32):
    """A folder as transformers wrote them before safetensors: pickles, with an index if several."""
    model = save(kind, folder).to(dtype)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    state = model.state_dict()
    if files == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return model
    places = {n: f"pytorch_model-{i % files + 1}-of-{files}.bin" for i, n in enumerate(state)}
    for place in set(places.values()):
        torch.save({n: state[n] for n in state if places[n] == place}, folder / place)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return model
