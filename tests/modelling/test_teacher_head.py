"""A teacher's head held beside its student's: TRL's loss of all tokens, at every split."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.sections import RunConfig
from data.samples import IGNORE_INDEX, Samples
from data.token_outputs import SamplesWithTokenOutputs
from modelling.layers import LMHeadLoss
from modelling.model_family import get_family
from modelling.phases.teacher_head import TeacherHead
from planning.teacher_config import teacher_objective_and_dtype
from run.frozen_outputs import FrozenModel, hidden_states_kind
from sessions.loss_evaluation import LossSession
from sessions.training import TrainingSession
from tests.modelling.gptj import hf as gptj
from tests.modelling.llama import hf as llama
from tests.modelling.sessions import transposed
from tests.modelling.t5 import training as t5
from tests.modelling.test_distillation import distilling
from tests.modelling.token_logits import (
    TokenLogits,
    decoder_token_logits,
    seq2seq_token_logits,
)
from tests.modelling.torch_training import check_training, logical, train
from tests.modelling.weight_maps import base_weight_map
from tests.run.test_frozen_outputs import gptj_samples, t5_samples
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # other objectives have most of the programs

BATCH, STEPS, RATE, WEIGHT = 8, 3, 1e-2, 0.7


def trl_loss(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, training: Any
) -> torch.Tensor:
    """TRL's divergence of the tokens that both know, with the labels' cross-entropy.

    Args:
        student, teacher: logits of the loss tokens.
    """
    gkd = pytest.importorskip("trl.experimental.gkd")
    t, known = training.temperature, min(student.shape[-1], teacher.shape[-1])
    divergence = gkd.GKDTrainer.generalized_jsd_loss(
        student[None, :, :known], teacher[None, :, :known], labels[None], training.beta, t
    )
    ce = torch.nn.functional.cross_entropy(student, labels)
    return WEIGHT * t**2 * divergence + (1 - WEIGHT) * ce


def to_weights(config: RunConfig, model: Any) -> dict[str, np.ndarray]:
    """A model of transformers as the weights of a configuration."""
    if config.family != "llama":
        return logical(model)
    return dict(base_weight_map(config).from_hf(llama.weights_of(model)))


def check(
    config: RunConfig, model: Any, of_teacher: RunConfig, teacher: Any, samples: Samples,
    token_logits: Any, folder: Path,
) -> None:  # fmt: skip
    """Three steps of AdamW are torch's in float64, and an evaluation has the first loss."""
    of_teacher = replace(
        of_teacher, model=replace(of_teacher.model, eval=True), data=config.data,
        execution=config.execution,
    )  # fmt: skip
    weights = to_weights(of_teacher, teacher)  # before it is in float64
    frozen = FrozenModel("the teacher", of_teacher, "digest", lambda: weights, folder)
    kind = hidden_states_kind(teacher_objective_and_dtype(config, of_teacher)[1])
    samples = SamplesWithTokenOutputs(samples, frozen.outputs(samples, kind))
    given = [
        samples.take((np.arange(BATCH) + BATCH * step) % len(samples)) for step in range(STEPS)
    ]
    of_student: TokenLogits = token_logits(model.double())
    logits_of_teacher: TokenLogits = token_logits(teacher.double())

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"][batch["labels"] != IGNORE_INDEX]
        with torch.no_grad():
            expected = logits_of_teacher(batch)
        return trl_loss(of_student(batch), expected, labels, config.training)

    start = to_weights(config, deepcopy(model).float())
    expected = train(model, given, loss, RATE)
    make_head = partial(get_family(of_teacher).build_head, of_teacher)
    held = TeacherHead(of_teacher, config.model.output_vocab_size, make_head, lambda: weights)
    ours = TrainingSession(config, gradients=True, teacher_head=held)
    ours.write(start)
    named = dict if config.family != "llama" else base_weight_map(config).to_hf
    check_training(ours, given, expected, RATE, lambda found: dict(named(found)))
    assert not any(name.startswith("teacher") for name in found_names(ours, start))
    evaluation = LossSession(config, teacher_head=held)
    evaluation.write(start)
    with evaluation:
        first = evaluation.compute(Few(samples))
    assert first.mean == pytest.approx(expected.losses[0], rel=1e-5)


def found_names(model: TrainingSession, start: Any) -> list[str]:
    """Names of what a checkpoint would have."""
    model.write(start)
    with model:
        return list(model.tensors())


class Few:
    """The first samples of others."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return BATCH

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = self._samples.take(indices)
        return found


def learning(config: Any, places: int, **training: Any) -> Any:
    return distilling(config, places, top_k=None, distill_weight=WEIGHT, **training)


JSD = {"beta": 0.4, "temperature": 2.0}


@pytest.mark.parametrize(
    ("dp", "tp", "micro", "places", "settings", "vocabulary"),
    [
        (2, 2, 2, 2, JSD, 67),  # the teacher knows tokens that the student does not
        slow(1, 2, 2, 1, JSD, 55),  # and the other way round
        *(slow(1, 1, micro, 1, JSD, 61) for micro in (1, 2, 8)),
        *(slow(2, 2, 2, 3, {"beta": beta, "temperature": 0.5}, 61) for beta in (0.0, 1.0)),
    ],
)
def test_gptj_learns_as_with_trl(
    dp: int, tp: int, micro: int, places: int, settings: dict[str, Any], vocabulary: int,
    tmp_path: Path, monkeypatch: Any,
) -> None:  # fmt: skip
    """With the logits in slices of the tokens."""
    monkeypatch.setattr(
        LMHeadLoss, "_num_chunks", lambda self, x: self.layout.sequence_length(x) // 4
    )
    config = learning(gptj.small_config(dp, tp, micro), places, **settings)
    of_teacher = gptj.small_config(
        dp, tp, micro, layers=2, hidden_size=40, embedding={"vocab_size": vocabulary}
    )
    monkeypatch.setattr(gptj, "VOCABULARY", min(vocabulary, gptj.VOCABULARY))  # of the texts
    check(transposed(config, dp == 2), gptj.hf_model(config),
          transposed(of_teacher, dp == 2), gptj.hf_model(of_teacher, 1),
          gptj_samples(config, places), decoder_token_logits, tmp_path)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "teacher", "dp", "tp"),
    [
        slow("qwen3", "gemma2", 1, 2),  # a tied head with a cap
        slow("llama", "granite", 2, 2),  # tied, scaled
        slow("qwen3", "mistral", 2, 1),
    ],
)
def test_llama_shaped_models_do(kind: str, teacher: str, dp: int, tp: int, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    own = {"max_position_embeddings": 64, "rope_parameters": rope}
    one = llama.hf_config(kind, **own)
    other = llama.hf_config(teacher, hidden_size=48, num_hidden_layers=2, **own)
    config = learning(llama.our_config(one, dp, tp, 2), 2, **JSD)
    check(config, llama.hf_model(one), llama.our_config(other, dp, tp, 2),
          llama.hf_model(other, 1), gptj_samples(config, 2), decoder_token_logits,
          tmp_path)  # fmt: skip


@pytest.mark.parametrize(("dp", "tp", "micro"), [slow(1, 2, 2), slow(2, 2, 1), slow(1, 1, 8)])
def test_t5_does(dp: int, tp: int, micro: int, tmp_path: Path) -> None:
    config = learning(t5.our_config(dp, tp, micro, layers=1), 2, **JSD)
    check(config, t5.their_model(1), t5.our_config(dp, tp, micro, layers=2), t5.their_model(2),
          t5_samples(config, 2), seq2seq_token_logits, tmp_path)  # fmt: skip
