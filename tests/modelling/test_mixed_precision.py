"""Training in bfloat16 and float16 against Hugging Face's models, in float32 and in the same type.

Bounds are multiples of the type's unit roundoff u, half the distance of 1 from the next number:
2^-8 for bfloat16, 2^-11 for float16. One rounding makes a relative error of at most u, with a
standard deviation of u / √3. Errors of many roundings add up in quadrature:

- Gradients: between the inputs and a gradient lie about 75 roundings forwards (3 encoder layers of
  10, 3 decoder layers of 15), and as many backwards: √150 · u / √3 = 7 u. Bound: 8 u, on the norm
  of the error of all gradients together.
- Loss: it is computed in float32 from logits in float32; it is a mean over 50 tokens or more, and
  the errors of half the roundings, 5 u, come down by that: 5 u / √50 = 0.7 u. Bound: u at first,
  and 2 u over 5 steps, in which the weights are rounded 5 times.
- Against Hugging Face's model in the same type, whose errors have the same sources: no more than
  1.1 times its error, for all gradients and for all weights after 5 steps; 2.5 times for the
  gradient of any single weight, of which norms and biases have few elements to average over.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from config.sections import RunConfig
from sessions.training import StepResult
from tests.modelling.half_training import (
    FAMILIES,
    LOSS_SCALING,
    STEPS,
    Arrays,
    as_array,
    error,
    in_precision,
    rounded,
    t5_loss,
    train_half,
)
from tests.modelling.sessions import fine_tuning
from tests.modelling.t5 import training as t5
from tests.modelling.torch_training import Batch, Reference
from tests.slow import slow

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


# ---- training -----------------------------------------------------------------------------------
@cache
def train_with_torch(family: str, precision: str, computed_in: str) -> Reference:
    """Hugging Face's model, trained from weights rounded to `precision`."""
    their, dtype = FAMILIES[family], getattr(torch, computed_in)
    model = rounded(their.model(), getattr(torch, precision))
    scaling = LOSS_SCALING[precision]
    return train_half(model, dtype, their.batches(STEPS), their.loss(model), their.rate, scaling)


def train_session(
    config: RunConfig, start: Arrays, batches: list[Batch], rate: float
) -> tuple[list[StepResult], Arrays, Arrays]:
    """Results of the steps, the gradients of the first, and the last weights."""
    model = fine_tuning(config, gradients=True)
    model.write(start)
    with model:
        results = model.run([batches[0]], [rate], 0)
        gradients = model.gradients()
        for step, batch in enumerate(batches[1:], 1):
            results += model.run([batch], [rate], step)
        weights = model.read(optimizer=False)
    return results, gradients, {n: w.astype(np.float32) for n, w in weights.items()}


CASES = [
    slow("t5", "bfloat16", 1, 1),  # its blocks: layers/test_precision.py
    slow("t5", "float16", 1, 1),
    slow("t5", "bfloat16", 2, 2),
    slow("t5", "float16", 2, 2),
    slow("gptj", "bfloat16", 1, 1),
    slow("gptj", "float16", 1, 1),
    ("gptj", "bfloat16", 2, 2),  # whose program is most of those of masters and random rounding
    slow("gptj", "float16", 2, 2),
    slow("small", "bfloat16", 1, 1),
    slow("small", "float16", 1, 1),
    slow("small", "bfloat16", 2, 2),
]


@pytest.mark.parametrize(("family", "precision", "dp", "tp"), CASES)
def test_training_in_half_types(family: str, precision: str, dp: int, tp: int) -> None:
    """10 seconds each on two cores, a minute of `small`. For the bounds, see above."""
    exact, half = (train_with_torch(family, precision, p) for p in ("float32", precision))
    their, u = FAMILIES[family], UNIT[precision]
    model = rounded(their.model(), getattr(torch, precision))
    start = {n: as_array(p) for n, p in model.named_parameters()}
    config = in_precision(their.config(dp, tp), precision)
    results, gradients, weights = train_session(config, start, their.batches(STEPS), their.rate)

    losses = np.array([r.loss for r in results]) / exact.losses - 1
    assert abs(losses[0]) < u
    assert np.abs(losses).max() < 2 * u
    assert results[0].grad_norm == pytest.approx(exact.norms[0], rel=4 * u)
    wrong, their_wrong = (error(g, exact.gradients) for g in (gradients, half.gradients))
    weights_wrong, their_weights = (error(w, exact.weights) for w in (weights, half.weights))
    print(f"{family} {precision} {dp}x{tp}, in roundoffs: losses {np.round(losses / u, 2)}, "
          f"gradients {wrong / u:.2f} ({wrong / their_wrong:.2f} of Hugging Face's), "
          f"weights {weights_wrong / u:.2f} ({weights_wrong / their_weights:.2f})")  # fmt: skip
    assert wrong < 8 * u
    assert wrong < 1.1 * their_wrong
    for name, gradient in gradients.items():
        one = {name: exact.gradients[name]}
        bound = 2.5 * error({name: half.gradients[name]}, one)
        assert error({name: gradient}, one) < bound, name
    assert weights_wrong < 1.1 * their_weights
    # The comparison means something: the weights moved far compared with the errors.
    assert error(start, exact.weights) > 8 * weights_wrong


# ---- float16's range ----------------------------------------------------------------------------
def overflowing() -> torch.nn.Module:
    """A T5 whose feed-forward layers have inner features of 4e5 and more, as FLAN-T5's may be."""
    model = rounded(t5.their_model(), torch.float16)
    factors = {"wi_0": 32.0, "wi_1": 2048.0, "wo": 1 / 256}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= factors.get(name.split(".")[-2], 1.0)
    return rounded(model, torch.float16)


@pytest.mark.slow
def test_the_feed_forward_of_t5_overflows_without_a_scale_and_trains_with_it() -> None:
    """Without it every step is skipped. 20 seconds on two cores."""
    rate = 1e-4  # the weights of `wo` are about 4e-4
    model, batches = overflowing(), t5.batches(STEPS)
    start = {n: as_array(p) for n, p in model.named_parameters()}
    assert max(np.abs(w).max() for w in start.values()) < 2.0**15
    exact = train_half(model, torch.float32, batches, t5_loss(model), rate)

    def trained(scale: float) -> tuple[list[StepResult], Arrays, Arrays]:
        config = in_precision(t5.our_config(), "float16", model={"scale_ff": scale})
        return train_session(config, start, batches, rate)

    results, _, weights = trained(1.0)
    assert all(r.skipped for r in results)
    assert error(weights, start) == 0
    results, _, _ = trained(64.0)
    assert not any(r.skipped for r in results)
    assert results[0].loss == pytest.approx(exact.losses[0], rel=UNIT["float16"])
    fall = exact.losses[0] - exact.losses[-1]
    assert fall > 0.1
    assert results[0].loss - results[-1].loss == pytest.approx(fall, rel=0.05)
