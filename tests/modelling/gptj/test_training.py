"""The phased training program of GPT-J against Hugging Face's GPT-J in torch, float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelling.gptj.model import FAMILY
from modelling.layers import LMHeadLoss
from modelling.phases.training import build_training_program
from popxl import Tensor
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.gptj.training import RATE, STEPS, batches, reference
from tests.modelling.llama.training import loss_of_texts, several_texts
from tests.modelling.sessions import fine_tuning, transposed
from tests.modelling.torch_training import (
    check_training,
    logical,
    worst,
)
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

LAYOUTS = [
    pytest.param(2, 2, marks=pytest.mark.optimised),
    *(slow(1, 4), slow(1, 1), slow(1, 2)),  # their neighbours have them
]
TRANSPOSED = (2, 2)


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_loss_every_gradient_and_five_steps_of_adamw(dp: int, tp: int) -> None:
    """In one layout with the sequence before the batch."""
    model = fine_tuning(transposed(small_config(dp, tp), (dp, tp) == TRANSPOSED), gradients=True)
    model.write(logical(hf_model(small_config())))
    check_training(model, batches(STEPS), reference(), RATE)


def four_tokens_per_chunk(head: LMHeadLoss, x: Tensor) -> int:
    """Slices of four tokens."""
    return head.layout.sequence_length(x) // 4


@pytest.mark.slow  # by default texts of a sample are trained so
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
def test_so_with_the_loss_in_slices_of_the_tokens(dp: int, tp: int, monkeypatch) -> None:
    monkeypatch.setattr(LMHeadLoss, "_num_chunks", four_tokens_per_chunk)
    model = fine_tuning(transposed(small_config(dp, tp), dp == 2), gradients=True)
    model.write(logical(hf_model(small_config())))
    check_training(model, batches(STEPS), reference(), RATE)


def test_the_program_is_verified() -> None:
    from popxl._analysis.verify import verify_ir

    verify_ir(build_training_program(small_config(2, 2), FAMILY.build_phases).ir)


@pytest.mark.parametrize("slices", [four_tokens_per_chunk, slow(lambda self, x: 1)])
def test_texts_of_a_sample_do_not_see_one_another(slices, monkeypatch) -> None:
    """With the loss in slices of the tokens, and at once."""
    monkeypatch.setattr(LMHeadLoss, "_num_chunks", slices)
    config = small_config(1, 2, attention={"heads": 4, "rotary_dim": 4})
    data = replace(config.data, packing=False, examples_per_sample=3)
    training = replace(config.training, global_batch_size=8)
    config, model = replace(config, data=data, training=training), hf_model(small_config())
    batch, start = several_texts(0), logical(model)
    loss = loss_of_texts(model, {n: torch.tensor(a).long() for n, a in batch.items()})
    loss.backward()
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}
    ours = fine_tuning(config, gradients=True)
    ours.write(base_weight_map(config).from_hf(start))
    with ours:
        (result,) = ours.run([batch], [RATE], 0)
        gradients = ours.gradients()
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    error, name = worst(gradients, expected)
    assert error < 1e-4, name
