"""Programs whose speed is compared: this program, Hugging Face's model in torch, plain JAX.

All have the same examples. Ours and JAX's have the shapes of the configuration; torch's batches are
padded to their longest sequence, as users of transformers pad them. Several examples share a sample
of ours if `data.examples_per_sample` allows it. Each implementation runs in a process of its own,
because threads of a library that has just worked keep spinning and slow down the other one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any

import numpy as np

from benchmarks.reference_training import JaxTraining, is_supported
from config.errors import UserError
from config.sections import RunConfig
from config.task import Seq2SeqData
from data.samples import IGNORE_INDEX, Batch
from data.seq2seq import EncodedExamples, PackedExamples
from modelling.model_family import get_family
from sessions.generation import GenerationSession
from sessions.training import TrainingSession

Info = Mapping[str, Any]
"""A program's description as JSON."""


class Worker:
    """A compared program in a child process, as a context manager.

    Args:
        name: for messages.
        command: starts a process that calls `serve`.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def info(self) -> Info:
        """Returns the program's metadata, which it sends once, before the first run."""
        said: Info = self._read_line()
        return said

    def run(self) -> float:
        """Run the program once; returns the seconds it took."""
        _require_pipe(self._process.stdin).write("run\n")
        _require_pipe(self._process.stdin).flush()
        return float(self._read_line()["seconds"])

    def _read_line(self) -> Any:
        line = _require_pipe(self._process.stdout).readline()
        if not line:
            raise UserError(f"{self.name!r} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is not None:
            self._process.kill()
        self._process.communicate()  # closes its input, at whose end it ends


def serve(info: Info, program: Callable[[], float]) -> None:
    """Run a compared program in a child process, once per line that its parent `Worker` sends.

    Args:
        program: runs once and returns the seconds it took.
    """
    _print_json(info)
    for _ in sys.stdin:
        _print_json({"seconds": program()})


def _print_json(info: Info) -> None:
    print(json.dumps(info), flush=True)


def _require_pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


LEARNING_RATE = 1e-4

OURS = ("recompute", "keep")
TRAINING = (*OURS, "torch, checkpointing", "torch")
JAX = "jax, checkpointing"
GENERATION = ("ours", "torch")


def training_programs(config: RunConfig) -> tuple[str, ...]:
    """Returns the names of the compared programs that can train a model."""
    info = get_family(config).to_config_json(config)
    return (*TRAINING, JAX) if is_supported(info) else TRAINING


@dataclass(frozen=True)
class Implementation:
    """A compared program that is compiled and ready to run.

    Attributes:
        result: of its first run: the loss, or the tokens of each prompt without padding.
        run: runs it once more.
        flops: operations of matrix products that the work needs, no padding and nothing computed
            twice; None: another one says it.
    """

    result: float | list[list[int]]
    run: Callable[[], object]
    flops: float | None = None

    @property
    def info(self) -> Mapping[str, Any]:
        """Returns the result and the FLOPs of a run as JSON data."""
        return {"result": self.result, "flops": self.flops}

    def run_timed(self) -> float:
        """Run the program once; returns the seconds it took."""
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


# ---- training -----------------------------------------------------------------------------------
def training_implementation(
    name: str, config: RunConfig, mean_tokens: float | None = None
) -> Implementation:
    """Create the compared program of this name for an optimizer step on a micro-batch of examples.

    Args:
        mean_tokens: of a prompt; see `SampleFormat.make_random_samples`.
    """
    weights = get_family(config).weight_map(config).init_weights(config.model.seed)
    samples = _generate_examples(config, config.execution.micro_batch_size, mean_tokens)
    if name.startswith("torch"):
        from benchmarks.reference_training import TorchTraining

        batch = trim_padding(samples.take(range(len(samples))))
        model = TorchTraining(config, weights, checkpointing=name != "torch")
        flops = None
        if name == "torch":
            flops = _count_flops(
                lambda: [model.loss(one).backward() for one in _split_examples(batch)]
            )
        return _warm_up(lambda: model.step(batch, LEARNING_RATE), flops)
    if name == JAX:
        whole, jax_model = samples.take(range(len(samples))), JaxTraining(config, weights)
        return _warm_up(lambda: jax_model.step(whole, LEARNING_RATE))
    if _examples_per_sample(config) > 1:
        assert isinstance(samples, EncodedExamples)
        samples = PackedExamples.from_examples(samples, _examples_per_sample(config))
    execution = replace(config.execution, activations=name, micro_batch_size=len(samples))
    training = replace(config.training, global_batch_size=len(samples))
    ours = TrainingSession(replace(config, execution=execution, training=training))
    ours.write(weights)
    ours.__enter__()  # for as long as the process lives
    batch = samples.take(range(len(samples)))
    return _warm_up(lambda: ours.run([batch], [LEARNING_RATE])[0].loss)


# ---- generation ---------------------------------------------------------------------------------
def generation_implementation(
    name: str, config: RunConfig, count: int, mean_tokens: float | None = None
) -> Implementation:
    """Create the compared program of this name that answers `count` prompts in micro-batches."""
    weight_map = get_family(config).weight_map(config)
    weights = weight_map.init_weights(config.model.seed)
    input_ids, mask = _generate_prompts(config, count, mean_tokens)
    pad = get_family(config).to_config_json(config)["pad_token_id"]
    if name == "ours":
        ours = GenerationSession(config)
        ours.write(weights)
        ours.__enter__()  # for as long as the process lives
        return _warm_up(
            lambda: [row[row != pad].tolist() for row in ours.generate(input_ids, mask)]
        )
    from huggingface.torch_model import build_torch_model, generate_greedily

    model = build_torch_model(
        get_family(config).to_config_json(config),
        config.model.precision,
        weight_map.to_hf(weights),
    )
    batch = config.execution.micro_batch_size
    length = getattr(config.model, "output_length", None) or config.model.decoder_sequence_length

    def answers(size: int) -> list[list[int]]:
        all_answers: list[list[int]] = []
        for start in range(0, count, size):
            part = (slice(start, start + size), slice(mask[start : start + size].sum(1).max()))
            rows = generate_greedily(model, input_ids[part], length, mask[part])
            all_answers += [row[row != pad].tolist() for row in rows]
        return all_answers

    return _warm_up(lambda: answers(batch), _count_flops(lambda: answers(1)))


# ---- the work -----------------------------------------------------------------------------------
def trim_padding(batch: Batch) -> dict[str, np.ndarray]:
    """Returns a batch without columns that are padding in all rows."""
    lengths = {"labels": _count_used_columns(batch["labels"] != IGNORE_INDEX)}
    if "decoder_input_ids" in batch:
        lengths["decoder_input_ids"] = lengths["labels"]
        lengths |= dict.fromkeys(
            ("input_ids", "segment_ids"), _count_used_columns(batch["segment_ids"])
        )
    else:
        lengths |= dict.fromkeys(("input_ids", "segment_ids"), lengths["labels"])
    return {name: array[:, : lengths[name]] for name, array in batch.items()}


def _count_used_columns(mask: np.ndarray) -> int:
    """Returns the number of columns up to the last that has a True in a mask (rows, columns)."""
    return int(np.flatnonzero(mask.any(axis=0)).max(initial=-1)) + 1


def _split_examples(batch: Batch) -> list[dict[str, np.ndarray]]:
    """Split a padded batch into one batch per example, without padding."""
    rows = range(len(batch["labels"]))
    return [trim_padding({name: array[i : i + 1] for name, array in batch.items()}) for i in rows]


def _generate_examples(config: RunConfig, count: int, mean_tokens: float | None) -> Any:
    """Generate `count` examples of random tokens, one per sample."""
    if _examples_per_sample(config) > 1:
        config = replace(config, data=replace(config.data, examples_per_sample=1))
    return get_family(config).sample_format.make_random_samples(config, count, mean_tokens)


def _examples_per_sample(config: RunConfig) -> int:
    return config.data.examples_per_sample if isinstance(config.data, Seq2SeqData) else 1


def _generate_prompts(
    config: RunConfig, count: int, mean_tokens: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns random prompts: int32 token ids and mask (count, length)."""
    batch = _generate_examples(config, count, mean_tokens).take(range(count))
    input_ids = batch["input_ids"]
    return input_ids, batch["segment_ids"]


def _warm_up(run: Callable[[], Any], flops: float | None = None) -> Implementation:
    return Implementation(run(), run, flops)


def _count_flops(function: Callable[[], object]) -> float:
    """Returns the FLOPs of the torch matmuls that `function` runs; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    return float(counter.get_total_flops())
