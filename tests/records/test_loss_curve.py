"""The picture: the average it shows, and that it shows the run."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import image

from records.loss_curve import LOSS_COLOUR, RATE_COLOUR, draw_loss_curve, smooth


def test_smoothing_is_pandas_exponential_average():
    values = np.random.default_rng(0).normal(size=40)
    values[7] = np.nan
    expected = pd.Series(values).ewm(alpha=1 / 5, adjust=True).mean()
    np.testing.assert_allclose(smooth(values, 5), expected, rtol=1e-12)


def test_smoothing_of_nothing_and_of_nan():
    assert smooth([], 5).shape == (0,)
    assert np.isnan(smooth([np.nan], 5)).all()


def test_picture_shows_both_curves(tmp_path):
    rows = [
        {"step": step, "loss": 3 * 0.97**step, "learning_rate": 1e-3 * (1 - step / 100)}
        for step in range(100)
    ]
    draw_loss_curve(rows, tmp_path / "curve.png", "a run")
    pixels = image.imread(tmp_path / "curve.png")[..., :3]
    assert pixels.shape == (720, 960, 3)
    for colour in (LOSS_COLOUR, RATE_COLOUR):
        wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(axis=-1) < 0.01).sum() > 500, colour
