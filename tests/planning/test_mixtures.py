"""Plans of published mixtures: the work of the experts that a token chose, the memory of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from modelling.llama.config_json import to_config_json
from planning.requirements import finetuning_requirements
from tests.planning.presets import preset
from tests.slow import slow

BILLIONS = {"qwen3_30B_A3B": (30.5, 3.4), "gpt_oss_20b": (20.9, 4.2)}
"""Parameters as they are published, and those that a token works with, embeddings among them."""


@pytest.mark.parametrize("name", [slow("qwen3_30B_A3B"), "gpt_oss_20b"])
def test_a_mixture_works_with_few_of_its_experts_and_keeps_them_all(name: str) -> None:
    config = preset(name, training={"global_batch_size": 2})
    hf_config = to_config_json(config)
    with torch.device("meta"):
        kind = transformers.CONFIG_MAPPING[hf_config.pop("model_type")]
        theirs = transformers.AutoModelForCausalLM.from_config(kind(**hf_config))
    sizes = {n: p.numel() for n, p in theirs.named_parameters()}
    idle = 1 - config.model.num_experts_per_tok / config.model.num_experts
    of_experts = sum(n for name, n in sizes.items() if ".experts." in name)
    total, active = sum(sizes.values()), sum(sizes.values()) - idle * of_experts
    assert (round(total / 1e9, 1), round(active / 1e9, 1)) == BILLIONS[name]

    requirements = finetuning_requirements(config, "gpu 9.0")
    assert requirements.parameters == total
    assert requirements.state == pytest.approx(14 * total, rel=1e-3)
    # Forwards, again, and twice backwards; but the head and the experts' last products, which
    # nothing reads again, three times; embeddings gather.
    tables = config.model.vocab_size * config.model.hidden_size
    attention = config.model.num_hidden_layers * _flops_of_attention(config.model)
    last = (1 - idle) * of_experts / 3
    weights = 8 * (active - 2 * tables) - 2 * last + 6 * tables
    expected = config.model.sequence_length * (weights + 4 * attention)
    assert requirements.flops_per_sample == pytest.approx(expected, rel=0.05)


def _flops_of_attention(model: Any) -> int:
    """Of the two products of a token with all of its text."""
    return 4 * model.num_attention_heads * model.head_dim * model.sequence_length
