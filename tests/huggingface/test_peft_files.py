"""The files of PEFT's adapters: what is read of their settings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.numpy import save_file

from checkpoints import CheckpointError
from config.adapter import Adapter
from files.errors import FileError
from huggingface.peft_files import adapter_tensors, make_adapter_config, read_adapter_config


def written(folder: Path, **settings: Any) -> Path:
    """The file that PEFT writes for these settings."""
    peft.LoraConfig(**settings).save_pretrained(folder)
    return folder


def test_settings_that_peft_wrote(tmp_path: Path) -> None:
    found = read_adapter_config(written(tmp_path, r=4, target_modules=["v", "k"]))
    assert found == {
        "rank": 4, "alpha": 8.0, "dropout": 0.0, "rslora": False, "dora": False, "targets": "k,v",
        "modules_to_save": None, "rank_pattern": None, "alpha_pattern": None,
        "target_parameters": None, "trainable_tokens": None, "trainable_tokens_head": True,
    }  # fmt: skip
    assert Adapter(**found).is_target("encoder.k", "q")
    found = read_adapter_config(
        written(
            tmp_path, r=2, lora_alpha=3, lora_dropout=0.25, use_rslora=True, use_dora=True,
            target_modules="k", modules_to_save=["lm_head"], task_type="CAUSAL_LM",
            rank_pattern={"^a.k": 7}, alpha_pattern={"k": 0.5},
        )
    )  # fmt: skip
    assert found == {
        "rank": 2, "alpha": 3.0, "dropout": 0.25, "rslora": True, "dora": True, "targets": "(k)",
        "modules_to_save": "lm_head", "rank_pattern": "^a.k=7", "alpha_pattern": "k=0.5",
        "target_parameters": None, "trainable_tokens": None, "trainable_tokens_head": True,
    }  # fmt: skip
    adapter = Adapter(**found)  # a text is an expression for whole names
    assert adapter.is_target("k", "q")
    assert not adapter.is_target("encoder.k", "q")
    assert (adapter.lora_rank("a.k"), adapter.lora_rank("b.k")) == (7, 2)
    assert adapter.lora_scale("b.k") == pytest.approx(0.5 / 2**0.5)


def test_names_that_mean_none_of_its_modules_are_passed_over(tmp_path: Path) -> None:
    """As in PEFT, whose users list names of several kinds of models. Weights that no name means
    are there, too: PEFT writes an embedding that got new rows."""
    settings: dict[str, Any] = {"target_modules": ["q_proj", "c_attn", "wi"], "r": 2}
    settings |= {"modules_to_save": ["score", "norm"], "rank_pattern": {"q_proj": 1, "c_attn": 3}}
    written(tmp_path, **settings, alpha_pattern={"c_attn": 3})
    of_file = {f"base_model.model.{name}": np.zeros((2, 2), np.float32) for name in (
        "layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight", "norm.weight",
    )}  # fmt: skip
    save_file(of_file, tmp_path / "adapter_model.safetensors")
    found = read_adapter_config(tmp_path)
    assert (found["targets"], found["modules_to_save"]) == ("q_proj", "norm")
    assert (found["rank_pattern"], found["alpha_pattern"]) == ("q_proj=1", None)
    save_file({"base_model.model.x.weight": np.zeros(1)}, tmp_path / "adapter_model.safetensors")
    found = read_adapter_config(tmp_path)  # of another model, which its names say
    assert (found["targets"], found["modules_to_save"]) == ("c_attn,q_proj,wi", "x")


NAMES = [
    *(f"model.layers.{n}.self_attn.{end}" for n in (0, 1, 2, 12) for end in ("q_proj", "k_proj")),
    *(f"model.layers.1.mlp.experts.{n}.up_proj" for n in range(3)),
    *(f"{s}.block.{n}.layer.{m}.x.q_proj" for s in ("encoder", "decoder")
      for n in range(3) for m in range(3)),
    *("layers.1.q_proj", "block.1.q_proj", "q_proj", "model.q_proj", "lm_head.up_proj", "1.q_proj"),
]  # fmt: skip


@pytest.mark.parametrize("layers", [1, 0, [0, 2], [12], [], None])
@pytest.mark.parametrize(
    "pattern", [None, [], "layer", "block", ["layers", "block"], ["experts", "layers", r"de.*k"]]
)
def test_layers_to_transform_mean_what_they_do_in_peft(tmp_path, layers, pattern) -> None:
    settings = {"target_modules": ["q_proj", "experts.2.up_proj", "1.up_proj"]}
    settings |= {"layers_to_transform": layers, "layers_pattern": pattern if layers else None}
    adapter = Adapter(**read_adapter_config(written(tmp_path, **settings)))
    theirs = peft.LoraConfig(**settings)
    expected = [bool(check_target_module_exists(theirs, name)) for name in NAMES]
    assert [adapter.is_target(name, "none") for name in NAMES] == expected
    assert len({*expected}) == 2


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"exclude_modules": ["v"]}, "exclude_modules is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path, settings, name) -> None:
    with pytest.raises(FileError, match=f"{name}.*but must be left out"):
        read_adapter_config(written(tmp_path, target_modules=["k"], **settings))


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no adapter in {tmp_path}: give a folder"):
        read_adapter_config(tmp_path)
    with pytest.raises(CheckpointError, match="no adapter_model.safetensors in"):
        adapter_tensors(tmp_path)
    peft.IA3Config(target_modules=["k"], feedforward_modules=[]).save_pretrained(tmp_path)
    with pytest.raises(FileError, match="peft_type is 'IA3', but must be LORA"):
        read_adapter_config(tmp_path)


def test_targets_are_the_shortest_names_that_mean_them_alone() -> None:
    adapter = Adapter(rank=2, alpha=3.0, rank_pattern="q=4", alpha_pattern="v=1.5")
    adapted = ["a.0.q", "a.1.q", "a.0.v"]
    found = make_adapter_config(
        adapter, (adapted, ["a.0.k", "b.v"]), ["n"], None, "base", "CAUSAL_LM"
    )
    assert found["target_modules"] == ["a.0.q", "a.0.v", "a.1.q"]
    found = make_adapter_config(adapter, (adapted, ["a.0.k"]), [], [3], None, "CAUSAL_LM")
    assert found["target_modules"] == ["q", "v"]
    assert (found["rank_pattern"], found["alpha_pattern"]) == ({"q": 4}, {"v": 1.5})
    assert json.loads(json.dumps(found)) == found
    ours = {"use_rslora", *(name for name in found if name != "peft_version")}
    assert ours <= set(peft.LoraConfig().to_dict())
