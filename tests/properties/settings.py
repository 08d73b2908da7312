"""How many programs are drawn, and their inputs."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, settings

from tests.properties.language import Body

FAST = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=2,  # the first is of the smallest values
    phases=[Phase.generate],  # shrinking compiles many programs: minutes, for the slow ones only
    suppress_health_check=list(HealthCheck),
)
SLOW = settings(FAST, max_examples=100, phases=[Phase.generate, Phase.shrink])


def inputs_of(body: Body, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in body.inputs]
