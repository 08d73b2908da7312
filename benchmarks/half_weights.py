"""What is lost of updates with weights, moments and gradients of fewer bits.

    python3 -m benchmarks.half_weights
    python3 -m benchmarks.half_weights --config gptj_tiny --rate 1e-5 --steps 100

Each way trains a preset from the same weights on the same batches, at a constant rate. Prints the
mean loss of the last steps, how much of the way that float32 weights went it missed, and how many
weights have changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from config.families import config_class_of
from config.presets import merge, preset_data
from config.sections import RunConfig
from data.loader import Loader
from data.pipeline import Pipeline
from modelling.spec import family_of
from modelling.weights import OPTIMIZER
from modelling.weights.optimizer_state import float32_weight
from sessions.session import compiled
from sessions.training import FineTuning
from terminal.entry_point import entry_point
from terminal.parser import Parser, count_option

COMPACT = {"training": {"optimizer": {"state": "compact"}, "gradients": "bfloat16"}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16, to nearest": {"training": {"stochastic_rounding": False}},
    "bfloat16, stochastically": {"training": {"stochastic_rounding": True}},
    "bfloat16, float32 masters": {"execution": {"master_weights": True}},
    "float32, moments in bfloat16": {"training": {"optimizer": {"state": "bfloat16"}}},
    "float32, compact": {"training": {"optimizer": {"state": "compact"}}},
    "bfloat16, compact": COMPACT,
    "bfloat16, compact16": merge(COMPACT, {"training": {"optimizer": {"state": "compact16"}}}),
}
LAST = 30
"""Steps whose loss is averaged."""


@dataclass(frozen=True)
class Result:
    """What a way of training gave.

    Attributes:
        loss: mean over the last steps.
        start, weights: at the start and the end, as precise as they are kept.
    """

    loss: float
    start: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray]

    @property
    def changed(self) -> float:
        """Fraction of the weights that are not what they were."""
        differ = sum(np.count_nonzero(w != self.start[n]) for n, w in self.weights.items())
        return differ / sum(w.size for w in self.weights.values())

    def missed(self, exact: Result) -> float:
        """The distance between its weights' way and that of another, relative to the latter's
        length."""
        wrong = way = 0.0
        for name, end in exact.weights.items():
            right = end.astype(np.float64) - exact.start[name]
            own = self.weights[name].astype(np.float64) - self.start[name]
            wrong, way = wrong + float(np.sum((own - right) ** 2)), way + float(np.sum(right**2))
        return float(np.sqrt(wrong / way))


def config_of(preset: str, way: str, batch: int, seed: int) -> RunConfig:
    """A preset that trains in one of the `WAYS`, on one device."""
    common = {
        "model": {"precision": way.partition(",")[0], "seed": seed},
        "training": {"global_batch_size": batch},
        "execution": {"micro_batch_size": batch, "data_parallel": 1, "tensor_parallel": 1},
    }
    data = merge(merge(preset_data("finetuning", preset), common), WAYS[way])
    return config_class_of(data, preset).from_dict(data)


def train(config: RunConfig, steps: int, rate: float) -> Result:
    """Train from the configured random weights."""
    family = family_of(config)
    data = Pipeline(config, family.sample_format)
    loader = Loader.of(config, data.training_samples())
    model = compiled(lambda: FineTuning(data.config), "the training program")
    model.write(family.weight_map(config).init_weights(config.model.seed))
    with model:
        start = _weights(model)
        losses = [model.run([loader.next_batch()], [rate], step)[0].loss for step in range(steps)]
        return Result(float(np.mean(losses[-LAST:])), start, _weights(model))


def _weights(model: FineTuning) -> dict[str, np.ndarray]:
    """Weights in float32, with what is kept of them besides."""
    tensors = model.tensors()
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER}/")]
    return {name: float32_weight(tensors, name) for name in names}


def table(results: Mapping[str, Result]) -> str:
    """A line for each way."""
    lines = ["| weights | loss | missed of float32's way | weights changed |", "|---|---|---|---|"]
    exact = results["float32"]
    for way, result in results.items():
        missed = result.missed(exact)
        lines.append(f"| {way} | {result.loss:.4f} | {missed:.1%} | {result.changed:.1%} |")
    return "\n".join(lines)


@entry_point(alone=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Train in each way and compare."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tiny", metavar="PRESET", help="what is trained")
    parser.add_argument("--steps", type=count_option, default=150)
    parser.add_argument("--batch", type=count_option, default=32, help="samples of a step")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--seed", type=int, default=42, help="of the initial weights")
    given = parser.parse_args(arguments)
    configs = {way: config_of(given.config, way, given.batch, given.seed) for way in WAYS}
    print(table({way: train(c, given.steps, given.rate) for way, c in configs.items()}))


if __name__ == "__main__":
    sys.exit(main())
