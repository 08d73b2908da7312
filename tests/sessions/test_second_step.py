"""The second step of a program compiles nothing: all that a run needs is compiled at its start."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from config.base import nest_by_path
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from config.sections import RunConfig
from modelling.model_family import get_family
from popxl._compile import platforms
from sessions.training import TrainingSession

COMPILED = "/jax/core/compile/backend_compile_duration"
PRESETS = ("tiny", "bart_tiny", "t5gemma_tiny", "gptj_tiny", "qwen3_tiny")


@pytest.fixture
def compilations(monkeypatch):
    """The names of the events of XLA's compilations, as they come."""
    found: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def tiny_config(preset: str, update: str) -> RunConfig:
    """A preset with two micro-batches of two samples."""
    config_class = config_class_of_preset(load_preset("finetuning", preset), preset)
    fields = {
        "training.global_batch_size": 4,
        "execution.micro_batch_size": 2,
        "execution.update": update,
        "execution.device": "cpu",
    }
    return load_config(config_class, "finetuning", preset, nest_by_path(fields))


@pytest.mark.parametrize(
    ("preset", "has_two_memories"),
    [
        pytest.param("gptj_tiny", True, id="gptj_tiny, as on a GPU"),
        *(pytest.param(p, False, id=p, marks=pytest.mark.slow) for p in PRESETS),
        *(pytest.param(p, True, id=f"{p}, as on a GPU", marks=pytest.mark.slow)
          for p in PRESETS if p != "gptj_tiny"),
    ],
)  # fmt: skip
def test_the_second_step_compiles_nothing(preset, has_two_memories, compilations, monkeypatch):
    """On a GPU the second step is the first that updates behind the forward pass."""
    if has_two_memories:
        monkeypatch.setattr(platforms.Cpu, "host_memory", "pinned_host")
    config = tiny_config(preset, "deferred" if has_two_memories else "auto")
    family, batch_size = get_family(config), config.training.global_batch_size
    samples = family.sample_format.make_random_samples(config, 2 * batch_size, None)
    batches = [samples.take(np.arange(batch_size) + batch_size * i) for i in range(2)]
    model = TrainingSession(config)
    model.write(family.weight_map(config).init_weights(0))
    assert compilations, "the listener hears of compilations"
    with model:
        model.run([batches[0]], [1e-4], 0)
        compilations.clear()
        for step in (1, 2):
            model.run([batches[step % 2]], [1e-4], step)
        model.session.wait_until_idle()
    assert compilations == []
