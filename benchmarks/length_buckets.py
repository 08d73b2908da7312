"""Compare training with samples padded to their bucket's length and to the longest.

    python3 -m benchmarks.length_buckets --record benchmarks/results/length_buckets.jsonl

Prompts are random, of log-normal lengths. Both ways train on as many samples a round, and
take turns; a ratio is the median over rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.disk_offload import append_record
from config.length_buckets import FIELD
from config.presets import load_config
from config.t5 import T5Config
from data.loader import Loader
from data.samples import sample_lengths
from data.seq2seq import SEQ2SEQ
from modelling.model_family import get_family
from sessions.training import TrainingSession
from terminal.entry_point import entry_point
from terminal.parser import Parser, parse_count_option

MEAN_TOKENS = 48.0
"""Average number of tokens of a random prompt."""

RATE = 1e-4


class PaddingRun:
    """Training with one of the two ways to pad: a session, and the batches that it reads.

    Attributes:
        seconds: of each round.
    """

    def __init__(self, config: T5Config, batches: int) -> None:
        """Compile the program and write random weights."""
        samples = SEQ2SEQ.make_random_samples(
            config, batches * config.training.global_batch_size, MEAN_TOKENS
        )
        self.lengths = sample_lengths(samples)
        self.loader, self.batches = Loader.from_config(config, samples), batches
        self.model = TrainingSession(config)
        self.model.write(get_family(config).weight_map(config).init_weights(config.model.seed))
        self.seconds, self._step = list[float](), 0

    def run_round(self) -> None:
        """Train on as many samples as in each other round; measures the seconds."""
        start = time.perf_counter()
        for _ in range(self.batches):
            self.model.run([self.loader.next_batch()], [RATE], self._step)
            self._step += 1
        self.seconds.append(time.perf_counter() - start)


def measure(config: T5Config, lengths: str, rounds: int, batches: int) -> dict[str, Any]:
    """Measure padding to buckets and to the longest sample in turn, without the first round.

    Args:
        lengths: value of `data.length_buckets`.
        batches: steps of a round.
    """
    padded, buckets = (PaddingRun(config.with_values({FIELD: v}), batches) for v in (None, lengths))
    with padded.model, buckets.model:
        for _ in range(rounds + 1):
            padded.run_round()
            buckets.run_round()
    pairs = list(zip(padded.seconds[1:], buckets.seconds[1:], strict=True))
    return {
        "lengths": lengths,
        "sequence_length": config.model.sequence_length,
        "mean_tokens": round(float(np.mean(padded.lengths)), 1),
        "samples": batches * config.training.global_batch_size,
        "rounds": rounds,
        "ratio": round(median(a / b for a, b in pairs), 3),
        "ratios": [round(a / b, 3) for a, b in pairs],
        "padded_s": round(median(a for a, _ in pairs), 3),
        "buckets_s": round(median(b for _, b in pairs), 3),
        "padded_executables": padded.model.session.num_executables,
        "buckets_executables": buckets.model.session.num_executables,
    }


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both ways of padding, print a JSON line, and add it to the record file."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = Parser.of_script(__doc__)
    parser.add_argument("--config", default="small", help="preset of a T5")
    parser.add_argument(
        "--layers", type=parse_count_option, default=2, help="of encoder and decoder"
    )
    parser.add_argument("--lengths", default="32,48,64", help="of the buckets")
    parser.add_argument("--rounds", type=parse_count_option, default=5)
    parser.add_argument("--batches", type=parse_count_option, default=8, help="steps of a round")
    parser.add_argument("--record", type=Path, help="file of records")
    args = parser.parse_args(given)
    overrides = {"model": {"layers": args.layers}, "execution": {"device": "cpu"}}
    config = load_config(T5Config, "finetuning", args.config, overrides)
    shown = " ".join(a for a in given if a not in ("--record", str(args.record)))
    command = {"command": f"python3 -m benchmarks.length_buckets {shown}".rstrip()}
    append_record(command | measure(config, args.lengths, args.rounds, args.batches), args.record)


if __name__ == "__main__":
    main()
