"""Objectives: what a head learns is the objective's to say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

import popxl
import popxl_addons as addons
from config.metrics import compute_metric_mean
from data.samples import IGNORE_INDEX, Batch
from modelling.layers import ActivationLayout, ParallelGroups
from modelling.objectives import CrossEntropy, Objective, make_objective
from popxl import Tensor, TensorSpec, ops
from tests.modelling.gptj.hf import small_config
from tests.modelling.standalone_modules import gptj_head


class SquaredReward(Objective):
    """Each text's logits times its rewards, an input that no other objective has, squared."""

    token_inputs: ClassVar = {"reward": lambda tokens: TensorSpec(tokens.shape, popxl.float32)}
    sequence_inputs: ClassVar = {}
    metrics: ClassVar = {"loss": partial(compute_metric_mean, "loss")}

    def loss_stats(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        layout: ActivationLayout,
        groups: ParallelGroups,
    ) -> Tensor:
        reward = layout.transpose_if_sequence_first(inputs["reward"]).reshape(
            (*logits.shape[:2], 1)
        )
        return ops.sum(logits * reward, [1, 2])

    def loss(self, sums: Tensor, inputs: Mapping[str, Tensor], groups: ParallelGroups) -> Tensor:
        return ops.sum(sums * sums)

    def normalizer(self, batch: Batch) -> int:
        return len(batch["reward"])

    def keep_real_samples(self, batch: Batch, counted: np.ndarray) -> Batch:
        return {"reward": batch["reward"] * counted[:, None]}


def test_a_head_takes_and_learns_what_its_objective_says() -> None:
    hidden = small_config().model.hidden_size
    rng, ir = np.random.default_rng(0), popxl.Ir()
    x = rng.standard_normal((2, 3, hidden), np.float32)
    reward, weight = rng.standard_normal((2, 3), np.float32), np.float32(0.5)
    with ir.main_graph:
        made = gptj_head(small_config(), "reward", "weight")
        head = made.layer.layer
        head.objective = SquaredReward()
        tokens = TensorSpec((2, 3), popxl.int32)
        specs = head.objective.input_specs(tokens)
        assert list(specs) == ["reward", "weight"]
        facts, graph = made.create_graph(TensorSpec(x.shape, popxl.float32), *specs.values())
        values = {
            name: rng.standard_normal(f.shape, np.float32) for name, f in facts.to_dict().items()
        }
        variables = addons.NamedTensors.from_dict(
            {name: popxl.variable(value) for name, value in values.items()}
        )
        inputs = [popxl.variable(t) for t in (x, reward, weight)]
        (loss,) = graph.bind(variables).call(*inputs)
        stream = addons.host_store(loss)
    with popxl.Session(ir, "cpu") as session:
        found = float(session.run()[stream])
    mean, spread = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    normed = (x - mean) / spread * values["norm.weight"] + values["norm.bias"]
    logits = normed @ values["lm_head.weight"] + values["lm_head.bias"]
    np.testing.assert_allclose(
        found, 0.5 * ((logits * reward[..., None]).sum((1, 2)) ** 2).sum(), rtol=1e-3
    )


def test_cross_entropy_counts_labels_and_leaves_out_what_fills_up() -> None:
    objective = make_objective(small_config())
    labels = np.array([[1, 2], [3, IGNORE_INDEX], [4, 5], [6, 7]], np.int32)
    batch = {"labels": labels, "input_ids": labels}
    assert objective.normalizer(batch) == 7
    only = objective.keep_real_samples(batch, np.array([True, False]))  # two targets a sample
    assert objective.normalizer(only) == 3
    np.testing.assert_array_equal(only["labels"][:2], labels[:2])
    assert only["input_ids"] is labels
    assert objective.normalizer(batch) == 7, "the batch itself stays"


def test_perplexity_overflows_to_infinity() -> None:
    perplexity = CrossEntropy.metrics["perplexity"]
    assert perplexity({"loss": (1e4, 1)}) == math.inf
    assert perplexity({"loss": (8.0, 4)}) == np.exp(2.0)
