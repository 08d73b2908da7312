"""What the section of adapters takes, and what it means."""

from __future__ import annotations

import pytest

from config import regex_match
from config.adapter import Adapter
from config.errors import ConfigError
from config.t5 import T5Config


@pytest.mark.parametrize(
    ("targets", "module", "meant"),
    [
        (None, "a.q_proj", True),
        (None, "a.k_proj", False),
        ("k_proj, o_proj", "model.layers.0.self_attn.o_proj", True),
        ("proj", "model.layers.0.self_attn.o_proj", False),
        ("self_attn.o_proj", "model.layers.0.self_attn.o_proj", True),
        ("all-linear", "anything", True),
        (r".*\.(q|v)", "block.0.v", True),
        (r"block\.0", "block.0.v", False),
    ],
)
def test_targets(targets: str | None, module: str, meant: bool) -> None:
    assert Adapter(rank=1, targets=targets).is_target(module, "q_proj,v_proj") is meant


def test_modules_are_saved_with_what_is_inside() -> None:
    adapter = Adapter(rank=1, modules_to_save="mlp,norm")
    saved = ["layers.0.mlp.up_proj", "layers.1.mlp", "model.norm", "input_layernorm"]
    assert all(map(adapter.is_fully_trained, saved))
    assert not any(map(adapter.is_fully_trained, ["layers.0.attn.up_proj", "mlps", "norms.0"]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"targets": "(q"}, "no regular expression"),
        ({"rank_pattern": "q"}, "such as k_proj=4"),
        ({"rank_pattern": "q=0"}, "positive numbers"),
        ({"rank_pattern": "q=1.5"}, "ranks are integers"),
        ({"rank_pattern": "(=2"}, "positive numbers"),
        ({"alpha_pattern": "q=inf"}, "positive numbers"),
        ({"dropout": 1.0}, "not including, 1"),
    ],
)
def test_what_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Adapter(**fields)


def test_what_a_run_refuses() -> None:
    rank = {"adapter": {"rank": 2}}
    with pytest.raises(ConfigError, match="set fp8.recipe current"):
        T5Config.from_dict(rank | {"fp8": {"enabled": True}})
    assert T5Config.from_dict(
        rank | {"fp8": {"enabled": True, "recipe": "current"}}
    ).has_frozen_weights


@pytest.mark.parametrize("field", ["targets", "rank_pattern"])
def test_an_expression_that_takes_too_long_is_named(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What strangers wrote: repetitions inside repetitions, which have no end."""
    monkeypatch.setattr(regex_match, "SECONDS", 0.05)
    slow = r"(.+?)+?(?=!)"
    given = {"targets": slow} if field == "targets" else {"rank_pattern": f"{slow}=2"}
    adapter, module = Adapter(rank=1, **given), f"model.layers.0.self_attn.{'q' * 40}"
    with pytest.raises(ConfigError, match="takes more than 0.05 s for model.layers.0.self_attn.q"):
        adapter.is_target(module, "q") if field == "targets" else adapter.lora_rank(module)


def test_names_match_an_expression_that_has_nested_repetitions() -> None:
    assert not Adapter(rank=1, targets="((([a-z._0-9]+)+)+)+!").is_target("a.b.q_proj" * 9, "q")
    assert Adapter(rank=1, targets="(([a-z._0-9]+)+)+").is_target("a.b.q_proj" * 9, "q")
