"""Model types on the Hugging Face hub that are not supported, with reasons."""

from __future__ import annotations

UNSUPPORTED = {
    "a mixture of experts": "dbrx deepseek_v2 deepseek_v3 ernie4_5_moe glm4_moe granitemoe "
    "hunyuan_v1_moe jamba llama4 llama4_text minimax nllb-moe phimoe "
    "qwen3_next qwen3_5_moe",
    "an encoder alone, which writes nothing": "albert bert deberta deberta-v2 distilbert electra "
    "modernbert roberta xlm-roberta",
    "a model of texts and images whose text part is not read": "gemma3n gemma4 idefics3 internvl "
    "llava llava_next mllama paligemma pixtral qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl smolvlm",
    "a model with a recurrent state": "bamba falcon_h1 falcon_mamba mamba mamba2 qwen3_5_text "
    "recurrent_gemma rwkv zamba2",
    "another encoder-decoder": "longt5 pegasus_x",
    "a model of speech": "qwen2_audio voxtral wav2vec2 whisper",
    "a decoder with other layers": "bloom cohere cohere2 exaone4 falcon gemma gemma4_text glm glm4 "
    "gpt2 gpt_bigcode gpt_neo gpt_neox mpt opt phi stablelm starcoder2",
}
"""Kinds by the reason, which completes "it is ..."."""


def unsupported_reason(model_type: str) -> str | None:
    """Returns why a `model_type` is not supported; None for an unknown type."""
    return next(
        (reason for reason, kinds in UNSUPPORTED.items() if model_type in kinds.split()), None
    )
