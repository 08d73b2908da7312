"""Runs of a program from given weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import popxl


def run_from_weights(
    ir: popxl.Ir,
    device: str,
    weights: Mapping[popxl.Variable, np.ndarray],
    feeds: Iterable[Mapping[Any, Any]],
) -> tuple[list[Any], dict[popxl.Variable, np.ndarray]]:
    """Run a program with each of the feeds; returns the outputs of each run, and the weights."""
    with popxl.Session(ir, device) as session:
        session.write_variables_data(weights)
        outputs = [session.run(feed) for feed in feeds]
    return outputs, {t: session.get_tensor_data(t) for t in weights}
