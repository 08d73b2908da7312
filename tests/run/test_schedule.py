"""The learning rate of every step, against Hugging Face's schedules."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler
from transformers.optimization import Adafactor

from config.errors import ConfigError
from config.presets import merge
from config.sections import LearningRate, Optimizer, Training
from run.schedule import Schedule

HUGGING_FACE = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def training(steps, **rate):
    return Training(steps=steps, optimizer=Optimizer(learning_rate=LearningRate(**rate)))


def hugging_face_rates(function, maximum, warmup, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=maximum)
    scheduler = get_scheduler(HUGGING_FACE[function], optimizer, warmup, steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("function", HUGGING_FACE)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 20), (1, 1), (20, 20)])
def test_same_rates_as_hugging_face(function, warmup, steps):
    schedule = Schedule.of(training(steps, function=function, maximum=3e-4, warmup_steps=warmup))
    ours = [schedule(step) for step in range(steps)]
    assert ours == pytest.approx(hugging_face_rates(function, 3e-4, warmup, steps), rel=1e-12)


@pytest.mark.parametrize(("warmup", "maximum"), [(0, 1e-2), (10_000, 1e-2)])
def test_the_relative_step_is_adafactors(warmup, maximum):
    """With the maximum, and then the warm-up, that transformers writes out."""
    rate = Schedule.of(training(20_000, function="relative", maximum=maximum, warmup_steps=warmup))
    options = {"lr": None, "relative_step": True, "warmup_init": warmup > 0}
    options |= {"scale_parameter": False, "eps": (1e-30, 1e-3)}
    for step in (1, 2, 99, 9_999, 10_000, 15_000):
        theirs = Adafactor._get_lr(options, {"step": step})
        # Ours counts from 0, and its warm-up begins with 0.
        assert rate(step - (warmup == 0)) == pytest.approx(theirs, rel=1e-4)


def test_warmup_as_a_proportion_is_rounded_up():
    assert Schedule.of(training(25, warmup_proportion=0.1)).warmup_steps == 3
    assert Schedule.of(training(25)).warmup_steps == 0


@pytest.mark.parametrize(("function", "end"), [("linear", 0.0), ("cosine", 0.0), ("constant", 1.0)])
def test_the_end_value_holds_after_the_last_step(function, end):
    schedule = Schedule(function, maximum=1.0, warmup_steps=2, steps=10)
    assert [schedule(10), schedule(1000)] == [end, end]


def test_a_minimum_is_reached_as_in_transformers():
    schedule = Schedule.of(
        training(20, function="cosine", maximum=3e-4, minimum=2e-5, warmup_steps=3)
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 20, min_lr=2e-5)
    for step in range(25):
        assert schedule(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()
        if step == 20:
            break
    assert schedule(1000) == 2e-5
    assert Schedule("linear", 1.0, 0, 10, minimum=0.2)(5) == pytest.approx(0.6)
    assert Schedule("constant", 1.0, 0, 10, minimum=0.2)(5) == 1.0
    with pytest.raises(ConfigError, match="minimum 1.0 must be at most its maximum 0.1"):
        LearningRate(maximum=0.1, minimum=1.0)


@pytest.mark.parametrize("name", ["warmup_steps", "warmup_proportion"])
def test_one_way_of_saying_the_warmup_replaces_the_other(name):
    other = {"warmup_steps": "warmup_proportion", "warmup_proportion": "warmup_steps"}[name]
    base = {"learning_rate": {other: 0 if other == "warmup_steps" else 0.1}}
    found = merge(base, {"learning_rate": {name: 1}})["learning_rate"]
    assert (found[name], found[other]) == (1, None)
    LearningRate.from_dict(found)
