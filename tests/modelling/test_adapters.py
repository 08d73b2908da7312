"""Adapters against `peft` on Hugging Face's models in torch: loss, every gradient, AdamW."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from config.sections import RunConfig
from modelling.spec import family_of
from tests.modelling.gptj import hf as gptj_hf
from tests.modelling.gptj import training as gptj_training
from tests.modelling.llama import hf as llama_hf
from tests.modelling.llama import training as llama_training
from tests.modelling.peft_reference import named, renamed, with_peft
from tests.modelling.sessions import fine_tuning
from tests.modelling.t5 import training as t5_training
from tests.modelling.torch_training import Reference, check_training, logical, named_by_hf, train

SLOW = pytest.mark.slow
STEPS, RATE = 3, 2e-3
Batches = list[dict[str, np.ndarray]]


class Case(NamedTuple):
    """A small model of ours and theirs, and what both are trained on."""

    config: Callable[..., RunConfig]
    """For data and tensor parallelism and the micro-batch."""

    model: Callable[[], torch.nn.Module]
    batches: Batches
    loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def loss_of_tokens(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if "segments" in batch:
        return llama_training.loss_of_texts(model, batch)
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def case(kind: str) -> Case:
    if kind == "t5":
        given, loss = t5_training.batches(STEPS), lambda m, b: m(**named_by_hf(b)).loss
        return Case(t5_training.our_config, t5_training.their_model, given, loss)
    if kind == "gptj":
        of = gptj_hf.small_config
        given = gptj_training.batches(STEPS)
        return Case(of, lambda: gptj_hf.hf_model(of()), given, loss_of_tokens)
    theirs = llama_hf.hf_config(kind)
    given = llama_training.batches(STEPS)
    if kind not in ("qwen3", "phi3"):  # whose angles depend on lengths
        given = [llama_training.several_texts(5), *given[1:]]
    return Case(
        lambda *split: llama_hf.our_config(theirs, *split),
        lambda: llama_hf.hf_model(theirs),
        given,
        loss_of_tokens,
    )


def trained(kind: str, **settings: Any) -> tuple[dict[str, np.ndarray], Reference]:
    return _trained(kind, json.dumps(settings))


@cache
def _trained(kind: str, settings: str) -> tuple[dict[str, np.ndarray], Reference]:
    """Weights before, and what training gives, in float64."""
    of = case(kind)
    model = with_peft(of.model(), **json.loads(settings))
    start = named(logical(model))
    model.double()
    return start, renamed(train(model, of.batches, lambda b: of.loss(model, b), RATE))


# ---- every kind of model -------------------------------------------------------------------------
def check(kind: str, split: Sequence[int], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Train both with these settings of adapters."""
    of = case(kind)
    start, expected = trained(kind, **theirs)
    config = of.config(*split).changed({f"adapter.{name}": value for name, value in ours.items()})
    table = family_of(config).weights(config)
    model = fine_tuning(config, gradients=True)
    model.write(table.renamed(start))
    check_training(model, of.batches, expected, RATE, lambda ours: dict(table.for_files(ours)))


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("t5", (1, 1, 4)),
        ("gptj", (2, 2, 2)),
        ("llama", (1, 4, 2)),
        ("phi3", (2, 2, 2)),
        *(
            pytest.param(kind, split, marks=SLOW)
            for kind, split in (
                *(("t5", (2, 2, 2)), ("t5", (1, 2, 4)), ("gptj", (2, 1, 4)), ("qwen3", (1, 2, 2))),
                *(("phi3", (1, 1, 4)), ("gemma3_text", (1, 1, 4)), ("gemma3_text", (2, 2, 2))),
            )
        ),
    ],
)
def test_loss_every_gradient_and_three_steps_of_adamw(kind: str, split: tuple[int, ...]) -> None:
    """Of all linear maps, in fused products an adapter for each map that PEFT knows."""
    ours = {"rank": 4, "alpha": 6.0, "targets": "all-linear"}
    check(kind, split, ours, {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"})


# ---- settings -----------------------------------------------------------------------------------
QUERIES_ALONE = r".*layers\.\d+\.self_attn\.q_proj"
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rank": 4}, {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    (
        {"rank": 4, "alpha": 2.0, "rslora": True, "targets": QUERIES_ALONE},
        {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": QUERIES_ALONE},
    ),
    (
        {
            "rank": 4,
            "targets": "k_proj,v_proj,o_proj,up_proj",
            "rank_pattern": "k_proj=2,.*self_attn.o_proj=3",
            "alpha_pattern": "v_proj=5,up_proj=0.5",
            "modules_to_save": "lm_head,norm",
        },
        {
            "r": 4,
            "target_modules": ["k_proj", "v_proj", "o_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, ".*self_attn.o_proj": 3},
            "alpha_pattern": {"v_proj": 5, "up_proj": 0.5},
            "modules_to_save": ["lm_head", "norm"],
        },
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), SETTINGS, ids=["default", "expression", "patterns"])
def test_settings_mean_what_they_do_in_peft(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    check("mistral", (1, 2, 4), ours, theirs)
