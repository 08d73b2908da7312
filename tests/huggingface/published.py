"""Small folders of models as others published them, made by the facts in published.json.

The facts are config.json as it is, whether the kind is supported, and tensors that transformers
passes over. Sizes are replaced; names, types and all other settings stay.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

DTYPES = {
    "U8": torch.uint8, "BOOL": torch.bool, "F16": torch.float16, "F32": torch.float32,
    "BF16": torch.bfloat16,
}  # fmt: skip
LAYERS, HEAD = 2, 8
SIZES = {
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "head_dim": HEAD, "d_kv": HEAD,
    "intermediate_size": 24, "d_ff": 24, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "num_attention_heads": 2, "n_head": 2, "num_heads": 2,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "rotary_dim": 4, "n_positions": 32,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2,
    "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
CLASSES = {"LLaMAForCausalLM": "LlamaForCausalLM", "BartModel": "BartForConditionalGeneration"}
"""Classes that read files older than transformers' own, and files without a head."""


@cache
def facts() -> dict[str, Any]:
    """What is known of each checkpoint, by its name on the hub."""
    return json.loads((Path(__file__).parent / "published.json").read_text())


SUPPORTED = [name for name, fact in facts().items() if fact.get("supported", True)]
OTHERS = [name for name in facts() if name not in SUPPORTED]
UNREAD = {"_name_or_path", "transformers_version", "task_specific_params", "id2label", "label2id"}


def _form_of(setting: Any) -> Any:
    """A setting of config.json with each number, a size or a rate, as 0."""
    if isinstance(setting, dict):
        return {name: _form_of(x) for name, x in setting.items() if name not in UNREAD}
    if isinstance(setting, list):
        return [_form_of(x) for x in setting]
    return 0 if type(setting) in (int, float) else setting


@cache
def forms() -> dict[str, list[str]]:
    """Models by all that tells them apart but numbers: those of a form are read in one way."""
    found: dict[str, list[str]] = {}
    for name in SUPPORTED:
        form = [_form_of(small(facts()[name]["config"])), facts()[name].get("extra")]
        found.setdefault(json.dumps(form, sort_keys=True), []).append(name)
    return found


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with sizes replaced, where it says them. Ratios that matter stay: of heads to
    those of keys, and of the two depths of an encoder-decoder."""
    found = copy.deepcopy(dict(config))
    found |= {name: size for name, size in SIZES.items() if found.get(name) is not None}
    if found.get("num_key_value_heads") is not None:
        same = config["num_key_value_heads"] == config["num_attention_heads"]
        found["num_key_value_heads"] = 2 if same else 1
    if "num_layers" in found:
        decoder = config.get("num_decoder_layers")
        deeper = decoder is not None and decoder != config["num_layers"]
        found["num_layers"] = 3 if deeper else LAYERS
        if decoder is not None:
            found["num_decoder_layers"] = 1 if deeper else LAYERS
    if found["model_type"] == "gpt_oss":  # whose experts are packed by 32
        found |= {"hidden_size": 32, "intermediate_size": 32}
    for name in ("layer_types", "no_rope_layers"):
        if found.get(name):
            found[name] = found[name][:LAYERS]
    scaling = found.get("rope_scaling") or {}
    pairs = int(HEAD * found.get("partial_rotary_factor", 1)) // 2
    for name in scaling.keys() & {"short_factor", "long_factor"}:
        scaling[name] = scaling[name][:pairs]
    for name in ("text_config", "vision_config"):
        if name in found:
            found[name] = small(found[name])
    return found


def make_folder(name: str, folder: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write config.json and model.safetensors of a published model with random weights.

    Returns:
        The tensors in the file, by their names there.
    """
    hf_config = small(facts()[name]["config"])
    (folder / "config.json").write_text(json.dumps(hf_config))
    tensors = random_tensors(hf_config, folder, seed) | extra_tensors(name, hf_config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def class_of(folder: Path) -> Any:
    """transformers' class of the model in a folder."""
    (named,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, CLASSES.get(named, named))


def random_tensors(
    hf_config: Mapping[str, Any], folder: Path, seed: int
) -> dict[str, torch.Tensor]:
    """Random weights by the names and in the shapes of transformers' class, as files have them."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = class_of(folder)(config)
    shapes = revert_weight_conversion(model, model.state_dict())
    dtype = hf_config.get("torch_dtype") or hf_config.get("dtype") or "float32"
    if hf_config["model_type"] == "gpt_oss":
        dtype = "bfloat16"
    generator = torch.Generator().manual_seed(seed)
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    is_shared = any(n.endswith("shared.weight") for n in shapes)
    left_out = {n for n in shapes if "embed_tokens" in n} if is_shared else set()
    if tied and hf_config.get("tie_word_embeddings", True):
        left_out |= {n for n in shapes if n.endswith("lm_head.weight")}
    tensors = {}
    for name, like in shapes.items():
        if name not in left_out:
            values = torch.randn(like.shape, generator=generator) * 0.3
            tensors[name] = values.to(getattr(torch, dtype))
    if hf_config["architectures"] == ["BartModel"]:
        own = {n: x for n, x in tensors.items() if n.startswith("model.")}
        return {n.removeprefix("model."): x for n, x in own.items()}
    return _packed(tensors, generator) if hf_config["model_type"] == "gpt_oss" else tensors


def _packed(
    tensors: Mapping[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """gpt-oss's experts in MXFP4, whose maps are a multiple of 32 wide."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = found.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        found[f"{name}_blocks"] = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        found[f"{name}_scales"] = torch.full(shape[:3], 125, dtype=torch.uint8)
    return found


def extra_tensors(name: str, hf_config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What the published files hold besides weights, in the layers of a small model."""
    found = {}
    sizes = {**hf_config, "half of a head": HEAD // 2}
    for pattern, (kind, shape) in facts()[name].get("extra", {}).items():
        of = [sizes.get(size, size) for size in shape]
        for layer in range(LAYERS):
            values = torch.arange(math.prod(of)).reshape(of) % 2
            found[pattern.format(layer)] = values.to(DTYPES[kind])
    return found
