"""Summary of the trained weights before a run starts."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest

from modelling.model_family import get_family
from run.startup_warnings import trained_weights_summary
from tests.modelling.llama import hf


def notes(kind: str, **fields: Any) -> list[str]:
    config = hf.our_config(hf.hf_config(kind)).with_values(fields)
    return trained_weights_summary(config, get_family(config).weight_map(config))


@pytest.mark.parametrize(
    ("kind", "targets", "left"),
    [
        ("qwen3_moe", "q_proj,k_proj,v_proj,o_proj", "experts"),
        ("olmoe", "q_proj,v_proj", "experts"),
        ("phi3", "all-linear", "embed_tokens"),
    ],
)
def test_the_share_of_the_weights_beside_adapters_is_told(
    kind: str, targets: str, left: str
) -> None:
    """Counted as PEFT counts; experts are not adapted."""
    (note,) = notes(kind, **{"adapter.rank": 4, "adapter.targets": targets})
    theirs = targets if targets == "all-linear" else targets.split(",")
    model = hf.hf_model(hf.hf_config(kind))
    total = sum(parameter.numel() for parameter in model.parameters())
    base = {name: module.weight.numel() for name, module in model.named_modules()
            if getattr(module, "weight", None) is not None}  # fmt: skip
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=theirs))
    numbers = re.search(r"training ([\d,]+) weights of adapters .* model's ([\d,]+),", note)
    assert numbers
    ours, of_model = (int(number.replace(",", "")) for number in numbers.groups())
    assert ours == adapted.get_nb_trainable_parameters()[0]
    assert of_model == total
    beside = sum(base[name.removeprefix("base_model.model.")] for name, module in
                 adapted.named_modules() if hasattr(module, "lora_A"))  # fmt: skip
    assert f"beside {beside / total:.1%} of the model's" in note
    assert f"; not at all {left} " in note


def test_modules_that_are_trained_in_full_are_told() -> None:
    (note,) = notes("mistral", **{"adapter.rank": 4, "adapter.modules_to_save": "lm_head"})
    assert re.search(r"; in full lm_head [\d.]+%; not at all ", note)
    assert notes("mistral") == []


def test_rows_that_no_adapter_trains_are_told() -> None:
    fields = {"adapter.rank": 2, "model.new_rows": "5"}
    _, note = notes("qwen3", **fields)
    assert "rows in model.embed_tokens.weight are not trained: --adapter.modules_to_save" in note
    assert len(notes("qwen3", **fields, **{"adapter.modules_to_save": "lm_head"})) == 1
