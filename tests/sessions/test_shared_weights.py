"""Evaluation while training reads the training state: the same results, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from config.sections import RunConfig
from data.loader import Loader
from modelling.generation import GreedyStrategy
from modelling.model_family import get_family
from sessions.generation import GenerationSession
from sessions.loss_evaluation import LossSession
from sessions.session import ModelSession
from sessions.training import TrainingSession
from tests.modelling.gptj.hf import small_config as gptj_config
from tests.modelling.harness import small_config as t5_config
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("cached")  # lent and copied weights have the same programs


@contextmanager
def trained(config: RunConfig) -> Iterator[TrainingSession]:
    """A model after a step."""
    family = get_family(config)
    model = TrainingSession(config)
    model.write(family.weight_map(config).init_weights(1))
    loader = Loader.from_config(config, family.sample_format.make_random_samples(config, 32, None))
    with model:
        model.run([loader.next_batch()], [1e-2])
        yield model


def entered(borrower: ModelSession, model: TrainingSession) -> ModelSession:
    borrower.write(model.tensors(optimizer=False))
    return borrower


@pytest.mark.parametrize(
    "config",
    [
        gptj_config(1, 2, layers=2),
        *(
            slow(config)
            for config in (
                t5_config(1),
                # Phases that are cut:
                gptj_config(2).with_values({"training.trainable": "layer.0,layer.2"}),
                t5_config(1).with_values({"training.frozen": "encoder.1,decoder.0"}),
            )
        ),
    ],
)
def test_what_is_borrowed_is_what_would_be_copied(config):
    family = get_family(config)
    generation = replace(config.generation, weights="streamed", micro_batches=2)
    writing = replace(config, generation=generation)
    samples = family.sample_format.make_random_samples(config, 32, None)
    input_ids = np.random.default_rng(0).integers(
        3, 30, (8, config.model.sequence_length), np.int32
    )
    results = []
    with trained(config) as model:
        for weight_source in (None, model):
            with entered(LossSession(config, weight_source), model) as losses:
                size, loss = losses.session.remote_bytes(), losses.compute(samples).total
            with entered(
                GenerationSession(writing, GreedyStrategy(), weight_source), model
            ) as writer:
                size += writer.session.remote_bytes()
                results.append((loss, writer.generate(input_ids, np.ones_like(input_ids)), size))
        model.run(
            [Loader.from_config(config, samples).next_batch()], [1e-2], 1
        )  # its state is its own
    (loss, tokens, copied), (borrowed_loss, borrowed_tokens, borrowed) = results
    assert borrowed_loss == loss
    np.testing.assert_array_equal(borrowed_tokens, tokens)
    assert borrowed == 0
    assert copied >= 2 * 4 * sum(np.prod(w.shape) for w in family.weight_map(config).weights)


def test_the_state_may_be_on_disk(tmp_path, monkeypatch):
    """All of it, so that what is borrowed is read from files: the bits are those of memory."""
    monkeypatch.setattr("planning.hardware.disk_offload.MIN_ENTRY_BYTES", 1)
    monkeypatch.setattr("planning.hardware.disk_offload.check_memory_limit", lambda *args: None)
    config = gptj_config(1, 2, layers=2)
    limited = replace(config.execution, disk=str(tmp_path), host_memory=1e-6)
    found = []
    for execution in (config.execution, limited):
        given = replace(config, execution=execution)
        family = get_family(given)
        samples = family.sample_format.make_random_samples(given, 32, None)
        monkeypatch.setattr("planning.hardware.disk_offload.check_memory", lambda *args: None)
        with trained(given) as model:
            model.run([Loader.from_config(given, samples).next_batch()], [1e-2], 1)
            with entered(LossSession(given, model), model) as losses:
                found.append((losses.compute(samples).total, model.read()))
            traffic, use = model.session.disk_traffic, model.session.memory_use()
    assert traffic.read > traffic.written > 0
    assert use.remote < use.disk / 10
    (loss, state), (disk_loss, disk_state) = found
    assert disk_loss == loss
    for name, value in state.items():
        np.testing.assert_array_equal(disk_state[name], value)
    assert not list(tmp_path.iterdir())
