"""How far FP8 moves gradients, compared with how far they lie apart from batch to batch.

    python3 -m benchmarks.fp8_gradients --config gptj_tiny --load runs/gptj_tiny

Computes the gradients of every weight for some training batches twice, in the configuration's type
and in FP8, from the same weights; with delayed scaling the run needs scales. Distances are
Euclidean, and relative to a gradient's length. Where FP8's is small compared with the batches',
training cannot tell it from chance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.sections import FP8, RunConfig
from data.batches import Loader
from data.pipeline import Pipeline
from data.samples import Batch
from modelling.spec import family_of
from run.start import load_weights
from sessions.training import FineTuning
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from terminal.parser import count_option

Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Distances:
    """Distances between gradients of one weight, relative to their length; means over batches.

    Attributes:
        fp8: from a batch's gradient to the same in FP8.
        batches: from a batch's gradient to the expected one.
    """

    fp8: float
    batches: float


def distances(wide: Sequence[Gradients], narrow: Sequence[Gradients]) -> dict[str, Distances]:
    """For each weight.

    Args:
        wide, narrow: of the same batches, two or more; the latter in FP8.
    """
    return {
        name: _distances(*(np.stack([np.ravel(g[name]) for g in of]) for of in (wide, narrow)))
        for name in wide[0]
    }


def _distances(wide: np.ndarray, narrow: np.ndarray) -> Distances:
    def length(rows: np.ndarray) -> float:
        return float(np.mean(np.linalg.norm(rows.astype(np.float64), axis=-1)))

    # The mean of n batches has 1 / n of a batch's variance itself, and goes along with each.
    unbiased = np.sqrt(len(wide) / (len(wide) - 1))
    whole = length(wide)
    return Distances(length(narrow - wide) / whole, unbiased * length(wide - wide.mean(0)) / whole)


def gradients(config: RunConfig, weights: Gradients, batches: Sequence[Batch]) -> list[Gradients]:
    """The gradients of each batch's loss at these weights, which stay as they are."""
    model, gradients_of_batches = FineTuning(config, family_of(config), gradients=True), []
    model.write(weights)
    with model:
        for step, batch in enumerate(batches):
            model.run([batch], [0.0], step)
            gradients_of_batches.append(model.gradients())
    return gradients_of_batches


def compare(config: RunConfig, count: int) -> dict[str, Distances]:
    """Distances for `count` training batches, with the weights that the configuration loads."""
    family = family_of(config)
    wide = replace(config, fp8=FP8())
    narrow = replace(config, fp8=replace(config.fp8, enabled=True))
    weights = load_weights(narrow, family.weights(narrow)).tensors
    loader = Loader.of(config, Pipeline(config, family.sample_format).training_samples())
    batches = [loader.next_batch() for _ in range(count)]
    return distances(*(gradients(c, weights, batches) for c in (wide, narrow)))


def table(distances_of: Mapping[str, Distances]) -> str:
    """Distances, median and largest of all weights."""
    lines = ["| distance, of a gradient's length | median | largest |", "| --- | --- | --- |"]
    for title, name in (("by FP8", "fp8"), ("of a batch", "batches")):
        of = [getattr(d, name) for d in distances_of.values()]
        lines.append(f"| {title} | {np.median(of):.2f} | {max(of):.2f} |")
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=count_option, default=4, help="training batches")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and print."""
    description = __doc__.partition("\n")[0]
    line = read_command_line(description, "finetuning", "tiny", arguments, _add_options)
    print(table(compare(line.config, max(2, line.options.batches))))


if __name__ == "__main__":
    sys.exit(main())
