"""What a mixture of experts costs beside a dense model of the same active work.

    python3 -m benchmarks.experts
    python3 -m benchmarks.experts --tokens 8192 --further 7
    python3 -m benchmarks.experts --devices 2

Trains two small Llama-shaped models by turns: layers of experts, of which each token works with a
few, and feed-forward layers as wide as those few together. With tensor-parallel devices, a third:
experts that are whole on one of them (`execution.expert_parallel`), not cut over all. Prints
medians: of a step with one micro-batch and with many, and of what each further one adds, which is
forward pass, recomputation and gradient. The rest of a step goes by the weights, and a mixture has
more of them. Ends with one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from config.llama import LlamaConfig
from config.presets import load_config
from data.loader import Loader
from modelling.spec import family_of
from sessions.training import FineTuning
from terminal.entry_point import entry_point
from terminal.parser import Parser, count_option

LENGTH, HEAD = 256, 64  # tokens of a sample, features of a head
MIXTURE, DENSE, WHOLE = "mixture", "dense", "whole experts"


@dataclass(frozen=True)
class Measurement:
    """Seconds of one model, medians over rounds.

    Attributes:
        one: a step with one micro-batch.
        many: a step with many.
        further: what each further one adds.
    """

    one: float
    many: float
    further: float


def config_of(given: Namespace, kind: str, micro_batches: int) -> LlamaConfig:
    """The configuration of a model."""
    samples, mixture = max(1, given.tokens // LENGTH), kind != DENSE
    model = {
        "num_hidden_layers": given.layers,
        "hidden_size": given.hidden,
        "intermediate_size": given.inner * given.chosen,
        "num_attention_heads": given.hidden // HEAD,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "sequence_length": LENGTH,
        "max_position_embeddings": LENGTH,
    }
    if mixture:
        model |= {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": given.inner,
            "num_experts": given.experts,
            "num_experts_per_tok": given.chosen,
        }
    training = {"global_batch_size": samples * micro_batches}
    execution = {
        "micro_batch_size": samples,
        "activations": "recompute",
        "tensor_parallel": given.devices,
        "expert_parallel": kind == WHOLE,
    }
    changes: dict[str, Any] = {"model": model, "training": training, "execution": execution}
    return load_config(LlamaConfig, "finetuning", "qwen3_tiny", changes)


class Trained:
    """A model that trains on generated data, from random weights."""

    def __init__(self, config: LlamaConfig) -> None:
        family = family_of(config)
        samples = 4 * config.training.global_batch_size
        self.loader = Loader.of(config, family.sample_format.generated(config, samples, None))
        self.model, self.steps = FineTuning(config), 0
        self.model.write(family.weight_map(config).init_weights(config.model.seed))

    def seconds(self) -> float:
        """Take a step."""
        batch, begin = self.loader.next_batch(), time.perf_counter()
        self.model.run([batch], [1e-4], self.steps)
        self.steps += 1
        return time.perf_counter() - begin


def measure(given: Namespace) -> dict[str, Measurement]:
    """Measure the models by turns."""
    kinds = [MIXTURE, DENSE, *([WHOLE] if given.devices > 1 else [])]
    many = 1 + given.further
    programs = {
        (kind, count): Trained(config_of(given, kind, count))
        for kind in kinds
        for count in (1, many)
    }
    with ExitStack() as stack:
        for program in programs.values():
            stack.enter_context(program.model)
            program.seconds()
        rounds = [{key: p.seconds() for key, p in programs.items()} for _ in range(given.rounds)]
    steps = {key: statistics.median(each[key] for each in rounds) for key in programs}
    return {
        kind: Measurement(
            steps[kind, 1], steps[kind, many], (steps[kind, many] - steps[kind, 1]) / given.further
        )
        for kind in kinds
    }


def table(measured: dict[str, Measurement]) -> str:
    """A line for each model: seconds, each with its ratio to the dense model's."""
    width = max(map(len, measured))
    lines = [f"{'':{width}}" + "".join(f"{name:>9} s  ratio" for name in asdict(measured[DENSE]))]
    for kind, m in measured.items():
        pairs = zip(asdict(m).values(), asdict(measured[DENSE]).values(), strict=True)
        lines.append(
            f"{kind:{width}}" + "".join(f"{own:11.3f}  {own / of:5.2f}" for own, of in pairs)
        )
    return "\n".join(lines)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(description=__doc__.partition("\n")[0])
    defaults = {"layers": 2, "experts": 128, "chosen": 8, "hidden": 512, "inner": 128}
    defaults |= {"tokens": 2048, "further": 2, "rounds": 5, "devices": 1}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=count_option, default=default)
    given = parser.parse_args(arguments)
    measured = measure(given)
    print(table(measured))
    facts = {kind: asdict(of) for kind, of in measured.items()}
    print(json.dumps({"benchmark": "experts", **vars(given), **facts}))


if __name__ == "__main__":
    sys.exit(main())
