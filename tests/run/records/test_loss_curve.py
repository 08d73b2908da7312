"""The picture: the average it shows, and that it shows the run."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import image
from matplotlib.axes import Axes

from run.records.loss_curve import (
    EVAL_COLOR,
    LOSS_COLOR,
    LR_COLOR,
    centered_mean,
    draw_loss_curve,
)


def test_smoothing_is_pandas_centred_mean():
    values = np.random.default_rng(0).normal(size=41)
    values[7] = np.nan
    expected = pd.Series(values).rolling(9, center=True, min_periods=1).mean()
    np.testing.assert_allclose(centered_mean(values, 9)[4:-4], expected[4:-4], rtol=1e-12)
    assert centered_mean(values, 9)[0] == values[0]


def test_smoothing_does_not_lag():
    straight = np.arange(50.0)
    np.testing.assert_allclose(centered_mean(straight, 11), straight)


def test_smoothing_of_nothing_and_of_nan():
    assert centered_mean([], 5).shape == (0,)
    assert np.isnan(centered_mean([np.nan], 5)).all()


def test_picture_shows_both_curves(tmp_path):
    rows = [
        {"step": step, "loss": 3 * 0.97**step, "learning_rate": 1e-3 * (1 - step / 100)}
        for step in range(100)
    ]
    draw_loss_curve(rows, tmp_path / "curve.png", "a run")
    pixels = image.imread(tmp_path / "curve.png")[..., :3]
    assert pixels.shape == (720, 960, 3)
    for colour in (LOSS_COLOR, LR_COLOR):
        wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(axis=-1) < 0.01).sum() > 500, colour


def test_rewards_are_drawn_where_there_are_any(tmp_path):
    rows = [
        {"step": step, "loss": 0.7, "learning_rate": 1e-3, "rewards/chosen": 0.1 * step,
         "rewards/rejected": -0.1 * step, "rewards/margins": 0.2 * step}
        for step in range(100)
    ]  # fmt: skip
    draw_loss_curve(rows, tmp_path / "curve.png", "a run")
    pixels = image.imread(tmp_path / "curve.png")[..., :3]
    wanted = np.array([int(EVAL_COLOR[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    assert (np.abs(pixels - wanted).max(axis=-1) < 0.01).sum() > 300


def test_entropy_and_divergence_are_drawn_and_losses_below_zero(monkeypatch, tmp_path):
    lines, bottoms = [], []
    plot, set_ylim = Axes.plot, Axes.set_ylim

    def recorded_plot(self, *args, **kwargs):
        lines.append(kwargs.get("label"))
        return plot(self, *args, **kwargs)

    def recorded_limit(self, *args, **kwargs):
        bottoms.append(kwargs.get("bottom"))
        return set_ylim(self, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", recorded_plot)
    monkeypatch.setattr(Axes, "set_ylim", recorded_limit)
    rows = [{"step": step, "loss": -0.1, "learning_rate": 1e-3, "entropy": 2.0, "kl": 0.1}
            for step in range(9)]  # fmt: skip
    draw_loss_curve(rows, tmp_path / "curve.png", "a run")
    assert {"entropy", "kl"} < {*lines}
    assert bottoms.count(0) == 1, "of the learning rate alone"
    without_kl = [{n: x for n, x in row.items() if n != "kl"} for row in rows]
    lines.clear()
    draw_loss_curve(without_kl, tmp_path / "curve.png", "a run")
    assert "kl" not in lines


def test_a_loss_that_falls_far_has_a_logarithmic_axis(monkeypatch, tmp_path):
    scales = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.set_yscale", lambda self, name, **_: scales.append(name)
    )
    rows = [{"step": i, "loss": 34.0 / (i + 1), "learning_rate": 0.1} for i in range(30)]
    rows[20]["eval_loss"] = 2.0
    draw_loss_curve(rows, tmp_path / "curve.png", "a run")
    assert scales == ["log"]
    scales.clear()
    draw_loss_curve([{**row, "loss": 1.0} for row in rows], tmp_path / "curve.png", "a run")
    assert scales == []
