"""The learning rate of every step, against Hugging Face's schedules."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_scheduler,
    get_wsd_schedule,
)
from transformers.optimization import Adafactor

from config.errors import ConfigError
from config.presets import merge_over
from config.sections import LearningRate, Optimizer, Training
from run.learning_rate import LRSchedule, lr_change_message

HUGGING_FACE = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def training(steps, **rate):
    return Training(steps=steps, optimizer=Optimizer(learning_rate=LearningRate(**rate)))


def hugging_face_rates(function, maximum, warmup, steps):
    return rates_of(
        lambda o: get_scheduler(HUGGING_FACE[function], o, warmup, steps), maximum, steps
    )


def rates_of(made, maximum, steps):
    """The rates of one of transformers' schedulers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=maximum)
    scheduler, rates = made(optimizer), []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("function", HUGGING_FACE)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 20), (1, 1), (20, 20)])
def test_same_rates_as_hugging_face(function, warmup, steps):
    schedule = LRSchedule.from_config(
        training(steps, function=function, maximum=3e-4, warmup_steps=warmup)
    )
    ours = [schedule(step) for step in range(steps)]
    assert ours == pytest.approx(hugging_face_rates(function, 3e-4, warmup, steps), rel=1e-12)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 20), (1, 1), (20, 20), (5, 43)])
@pytest.mark.parametrize("cycles", [1, 2, 5])
def test_restarts_are_those_of_hugging_face(warmup, steps, cycles):
    own = training(
        steps, function="cosine_with_restarts", maximum=3e-4, warmup_steps=warmup, num_cycles=cycles
    )
    shown = steps + 5 * (warmup < steps)  # there, theirs ends at the maximum
    theirs = rates_of(
        lambda o: get_cosine_with_hard_restarts_schedule_with_warmup(o, warmup, steps, cycles),
        *(3e-4, shown),
    )
    assert [LRSchedule.from_config(own)(s) for s in range(shown)] == pytest.approx(
        theirs, rel=1e-12
    )


@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 20), (0, 40), (5, 43)])
@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 0.8])
@pytest.mark.parametrize("minimum", [0.0, 1e-5])
def test_warm_up_stable_decay_is_that_of_hugging_face(warmup, steps, decay, minimum):
    """But that our warm-up begins with 0 where there is a minimum."""
    rate = {"warmup_steps": warmup, "decay_proportion": decay, "minimum": minimum}
    schedule = LRSchedule.from_config(training(steps, function="wsd", maximum=3e-4, **rate))
    falling = math.ceil(decay * steps)
    theirs = rates_of(
        lambda o: get_wsd_schedule(
            o, warmup, falling, num_training_steps=steps, min_lr_ratio=minimum / 3e-4
        ),
        *(3e-4, steps + 5),
    )
    first = warmup if minimum else 0
    ours = [schedule(step) for step in range(first, steps + 5)]
    assert ours == pytest.approx(theirs[first:], rel=1e-12)


@pytest.mark.parametrize("function", ["linear", "cosine", "wsd"])
def test_a_schedule_that_begins_in_mid_run_goes_over_what_is_left(function):
    rate = {"function": function, "maximum": 3e-4, "warmup_proportion": 0.2}
    late = LRSchedule.from_config(training(100, **rate, start_step=60))
    alone = LRSchedule.from_config(training(40, **rate))
    assert [late(60 + step) for step in range(45)] == [alone(step) for step in range(45)]
    assert late(99) < late(70)


def test_another_rate_in_mid_run_is_said_with_what_to_do():
    before = training(1000, function="linear", maximum=1e-4)
    more = training(1000, function="linear", maximum=8e-4)
    said = lr_change_message(before, more, 900)
    assert said.startswith("learning rate of step 901: 8e-05, not 1e-05 as before; --training.")
    assert "start_step 900 begins a new schedule here" in said
    for rate in ({"function": "linear", "start_step": 900}, {"function": "constant"}):
        own = training(1000, maximum=8e-4, **rate)
        text = "learning rate of step 901: 0.0008, not 1e-05 as before"
        assert lr_change_message(before, own, 900) == text
    assert lr_change_message(before, before, 900) is None


@pytest.mark.parametrize(("warmup", "maximum"), [(0, 1e-2), (10_000, 1e-2)])
def test_the_relative_step_is_adafactors(warmup, maximum):
    """With the maximum, and then the warm-up, that transformers writes out."""
    rate = LRSchedule.from_config(
        training(20_000, function="relative", maximum=maximum, warmup_steps=warmup)
    )
    options = {"lr": None, "relative_step": True, "warmup_init": warmup > 0}
    options |= {"scale_parameter": False, "eps": (1e-30, 1e-3)}
    for step in (1, 2, 99, 9_999, 10_000, 15_000):
        theirs = Adafactor._get_lr(options, {"step": step})
        # Ours counts from 0, and its warm-up begins with 0.
        assert rate(step - (warmup == 0)) == pytest.approx(theirs, rel=1e-4)


def test_warmup_as_a_proportion_is_rounded_up():
    assert LRSchedule.from_config(training(25, warmup_proportion=0.1)).warmup_steps == 3
    assert LRSchedule.from_config(training(25)).warmup_steps == 0


@pytest.mark.parametrize(("function", "end"), [("linear", 0.0), ("cosine", 0.0), ("constant", 1.0)])
def test_the_end_value_holds_after_the_last_step(function, end):
    schedule = LRSchedule.from_config(training(10, function=function, maximum=1.0, warmup_steps=2))
    assert [schedule(10), schedule(1000)] == [end, end]


def test_a_minimum_is_reached_as_in_transformers():
    schedule = LRSchedule.from_config(
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
    for function, rate in (("linear", 0.6), ("constant", 1.0)):
        own = training(10, function=function, maximum=1.0, minimum=0.2)
        assert LRSchedule.from_config(own)(5) == pytest.approx(rate)
    with pytest.raises(ConfigError, match="minimum 1.0 must be at most its maximum 0.1"):
        LearningRate(maximum=0.1, minimum=1.0)


@pytest.mark.parametrize("name", ["warmup_steps", "warmup_proportion"])
def test_one_way_of_saying_the_warmup_replaces_the_other(name):
    other = {"warmup_steps": "warmup_proportion", "warmup_proportion": "warmup_steps"}[name]
    base = {"learning_rate": {other: 0 if other == "warmup_steps" else 0.1}}
    found = merge_over(base, {"learning_rate": {name: 1}})["learning_rate"]
    assert (found[name], found[other]) == (1, None)
    LearningRate.from_dict(found)
