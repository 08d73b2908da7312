"""Programs that `python3 -m benchmarks.device --peers` compares: ours, and torch's four ways.

    python3 -m benchmarks.peer_programs ours --work '{"model": "...", "preset": "tiny", ...}'

Each runs in a process of its own, does the same optimizer steps on the same generated tokens, and
prints one line of JSON. torch's model is Hugging Face's, with weights and moments in the model's
precision and fused AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from config.base import nest_by_path
from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from config.sections import RunConfig
from data.causal_lm import PackedSequences, TokenStream
from data.samples import IGNORE_INDEX, Batch, Samples
from huggingface.torch_model import require_torch
from modelling.model_family import get_family
from terminal.entry_point import entry_point
from terminal.parser import Parser

LEARNING_RATE = 1e-4
_TEXTS_PER_SAMPLE = 16
_SPREAD = 0.45  # standard deviation of the logarithm of texts' lengths

OURS, LLMQ = "ours", "LLMQ"
TORCH = ("torch, kept", "torch, checkpointing", "torch, compiled", "torch, FSDP2 offload")
DEEPSPEED = "DeepSpeed, ZeRO-2 offload"


@dataclass(frozen=True)
class PeerWork:
    """One optimizer step that all programs do.

    Attributes:
        model: name of the model, for tables.
        fields: settings of the preset that differ, by dotted name.
        tokens: tokens of a step, padding included; rounded to whole micro-batches.
        packed: True for texts of several lengths, packed with attention within each; else every
            sample is one full sequence.
        steps: measured steps, after two that are not.
    """

    model: str
    preset: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 131_072
    packed: bool = False
    steps: int = 3

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def config(self, device: str = "auto", **more: Any) -> RunConfig:
        """Returns the configuration of our program, whose model and data all programs have."""
        config_class = config_class_of_preset(load_preset("finetuning", self.preset), self.preset)
        values = {"model.dropout_prob": 0.0, **self.fields, "execution.device": device, **more}
        if not hasattr(config_class().model, "decoder_sequence_length"):
            values["data.packing"] = not self.packed  # of full sequences, or of whole texts
            values["data.examples_per_sample"] = _TEXTS_PER_SAMPLE if self.packed else 1
        config = self._load_config(config_class, values)
        length = config.model.sequence_length + getattr(config.model, "decoder_sequence_length", 0)
        micro = config.execution.micro_batch_size
        batch = micro * max(round(self.tokens / length / micro), 1)
        return self._load_config(config_class, values | {"training.global_batch_size": batch})

    def _load_config(self, config_class: type[RunConfig], values: Mapping[str, Any]) -> RunConfig:
        return load_config(config_class, "finetuning", self.preset, nest_by_path(dict(values)))

    def samples(self, config: RunConfig) -> Samples:
        """Returns the samples of a step: random tokens, the same in every process."""
        count = config.training.global_batch_size
        if not self.packed:
            return get_family(config).sample_format.make_random_samples(config, count, None)
        return make_packed_texts(count, config.model.sequence_length, config.model.vocab_size)


def make_packed_texts(count: int, length: int, vocab_size: int, seed: int = 0) -> PackedSequences:
    """Returns samples of texts whose mean length is a quarter of the sequence length."""
    rng = np.random.default_rng(seed)
    mean = np.log(length / 4) - _SPREAD**2 / 2
    lengths = np.clip(rng.lognormal(mean, _SPREAD, 8 * count).astype(np.int64), 2, length + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(2, vocab_size, offsets[-1], np.int32)
    packed = PackedSequences.from_stream(
        TokenStream(tokens, tokens, offsets), length, 0, _TEXTS_PER_SAMPLE
    )
    samples = packed.samples[:count]  # the fullest
    return PackedSequences(packed.stream, samples, length, 0)


def count_tokens(batch: Batch) -> int:
    """Returns the tokens of a batch that are no padding, of both sides of an encoder-decoder."""
    tokens = np.count_nonzero(batch["segment_ids"])
    if "decoder_input_ids" in batch:
        tokens += np.count_nonzero(batch["labels"] != IGNORE_INDEX)
    return int(tokens)


@dataclass(frozen=True)
class StepTimes:
    """Measured optimizer steps of one program.

    Attributes:
        seconds: of a step, median.
        first_step: seconds from the start of the process to the end of its first step.
        tokens: of a step, without padding.
        loss: of the first step.
        state: precision of weights, moments and sums of gradients.
        peak_device_bytes: None where it is not known.
    """

    seconds: float
    first_step: float
    tokens: int
    loss: float
    state: str
    micro_batch_size: int
    peak_device_bytes: int | None = None


def time_steps(step: Callable[[], float], count: int, started: float) -> tuple[float, float, float]:
    """Run two steps and `count` timed ones.

    Returns:
        Median seconds, seconds from `started` to the end of the first step, and its loss.
    """
    loss = step()
    first = time.time() - started
    step()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), first, loss


# ---- ours ---------------------------------------------------------------------------------------
def measure_ours(work: PeerWork, device: str, started: float) -> StepTimes:
    """Measure this program's steps; the plan chooses placement, saved layers and passes."""
    from modelling.devices import resolve_device_desc
    from popxl import hardware
    from sessions.training import TrainingSession

    config = work.config(device)
    model = TrainingSession(config)
    model.write(get_family(config).weight_map(config).init_weights(config.model.seed))
    batch = work.samples(config).take(range(config.training.global_batch_size))
    steps = iter(range(work.steps + 2))
    with model:
        seconds, first, loss = time_steps(
            lambda: model.run([batch], [LEARNING_RATE], next(steps))[0].loss, work.steps, started
        )
    training = config.training
    state = (
        f"{config.model.precision} weights, {training.optimizer.state} moments, "
        f"{training.gradient_dtype} sums"
    )
    peak = hardware.peak_device_bytes(resolve_device_desc(config), 1)
    micro = config.execution.micro_batch_size
    return StepTimes(seconds, first, count_tokens(batch), loss, state, micro, peak)


# ---- torch --------------------------------------------------------------------------------------
class TorchProgram:
    """Optimizer steps of a Hugging Face model in torch.

    Args:
        model: on its device.
        update: clips the gradients and updates the weights; default: fused AdamW.
        backward: of a scaled loss; default: torch's own.
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        update: Callable[[], None] | None = None,
        backward: Callable[[Any], None] | None = None,
    ) -> None:
        import torch

        self._torch = torch
        self._model = model
        self._clip = config.training.optimizer.gradient_clipping
        self._backward = backward or (lambda loss: loss.backward())
        self._update = update or self._clip_and_update
        if update is None:
            optimizer = config.training.optimizer
            self._optimizer = torch.optim.AdamW(
                model.parameters(), LEARNING_RATE, (optimizer.beta1, optimizer.beta2),
                weight_decay=optimizer.weight_decay, fused=True,
            )  # fmt: skip

    def step(self, batch: Batch, micro_batch_size: int) -> float:
        """Run one optimizer step; returns the mean loss of its labels."""
        labels = int(np.count_nonzero(batch["labels"] != IGNORE_INDEX))
        total = 0.0
        for one in split_batch(batch, micro_batch_size):
            loss = self.loss_sum(one) / labels
            self._backward(loss)
            total = total + loss.detach()
        self._update()
        return float(total)

    def loss_sum(self, batch: Batch) -> Any:
        """Returns the sum of the losses of a batch's labels, which are shifted already."""
        torch, device = self._torch, next(self._model.parameters()).device
        if device.type == "cpu" and torch.cuda.is_available():
            device = torch.device("cuda")  # parameters are offloaded
        arrays = {n: torch.from_numpy(a).long().to(device) for n, a in torch_inputs(batch).items()}
        labels = arrays.pop("labels")
        logits = self._model(**arrays, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )

    def _clip_and_update(self) -> None:
        if self._clip is not None:
            self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def split_batch(batch: Batch, size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the micro-batches of a batch."""
    for start in range(0, len(batch["labels"]), size):
        yield {name: array[start : start + size] for name, array in batch.items()}


def torch_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Returns a batch as transformers takes it.

    Packed texts are told apart by positions that start anew, from which transformers makes the mask
    of attention within each.
    """
    inputs = {n: np.ascontiguousarray(batch[n]) for n in ("input_ids", "labels")}
    segments = batch["segment_ids"]
    if "decoder_input_ids" in batch:
        decoder = np.ascontiguousarray(batch["decoder_input_ids"])
        return inputs | {"decoder_input_ids": decoder, "attention_mask": (segments > 0).astype(int)}
    if segments.max(initial=0) > 1:
        columns = np.arange(segments.shape[1])
        starts = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
        inputs["position_ids"] = columns - np.maximum.accumulate(
            np.where(starts, columns, 0), axis=1
        )
    return inputs


def measure_torch(program: str, work: PeerWork, device: str, started: float) -> StepTimes:
    """Measure torch's steps; halves the micro-batch until the memory suffices."""
    require_torch()
    import torch

    on_gpu = torch.cuda.is_available() and device != "cpu"
    config = work.config("cpu")
    batch = work.samples(config).take(range(config.training.global_batch_size))
    micro = config.execution.micro_batch_size
    while True:
        try:
            model = build_random_model(config, "cuda" if on_gpu else "cpu")
            runner = prepare_torch(program, model, config, on_gpu)
            seconds, first, loss = time_steps(
                lambda micro=micro, runner=runner: runner.step(batch, micro), work.steps, started
            )
            break
        except torch.OutOfMemoryError as error:
            if micro == 1:
                raise UserError("device memory is full with micro-batches of one") from error
            micro //= 2
            model = runner = None
            torch.cuda.empty_cache()
    precision = config.model.precision
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    state = f"{precision} weights, {precision} moments, {precision} sums"
    if program == DEEPSPEED:
        state = f"{precision} weights, float32 masters and moments in host memory, {precision} sums"
    elif program == TORCH[3]:
        state += ", in host memory"
    return StepTimes(seconds, first, count_tokens(batch), loss, state, micro, peak)


def build_random_model(config: RunConfig, device: str) -> Any:
    """Build Hugging Face's model of a configuration with random weights, on a device."""
    import torch
    import transformers

    hf_config = get_family(config).to_config_json(config)
    architecture = getattr(transformers, hf_config["architectures"][0])
    precision = getattr(torch, config.model.precision)
    parsed = architecture.config_class.from_dict(dict(hf_config))
    # Only a class of `Auto*` takes the precision: https://huggingface.co/docs/transformers.
    with torch.device(device):
        return architecture._from_config(parsed, dtype=precision)


def prepare_torch(program: str, model: Any, config: RunConfig, on_gpu: bool) -> TorchProgram:
    """Returns a program of torch for a model, by its name in `TORCH` or `DEEPSPEED`."""
    import torch

    model.train()
    if program in (TORCH[1], TORCH[3], DEEPSPEED):
        model.activation_checkpointing_enable({"use_reentrant": False})
    if program == TORCH[2]:
        return TorchProgram(torch.compile(model), config)
    if program == TORCH[3]:
        return TorchProgram(_shard_with_offload(model, on_gpu), config)
    if program == DEEPSPEED:
        return _prepare_deepspeed(model, config)
    return TorchProgram(model, config)


def _shard_with_offload(model: Any, on_gpu: bool) -> Any:
    """Shard a model over one process with FSDP2, its parameters offloaded to host memory."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (1,))
    policy = CPUOffloadPolicy() if on_gpu else OffloadPolicy()  # on a CPU there is one memory
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def _prepare_deepspeed(model: Any, config: RunConfig) -> TorchProgram:
    """Returns DeepSpeed's program with ZeRO stage 2 and its optimizer in host memory."""
    if find_spec("deepspeed") is None:
        raise UserError("DeepSpeed is not installed: pip install deepspeed")
    import deepspeed

    optimizer = config.training.optimizer
    settings = {
        "train_micro_batch_size_per_gpu": config.execution.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": optimizer.gradient_clipping or 0.0,
        "bf16": {"enabled": config.model.precision == "bfloat16"},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": [optimizer.beta1, optimizer.beta2],
                "weight_decay": optimizer.weight_decay,
            },
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )

    def backward(loss: Any) -> None:  # it divides by the number of micro-batches, and steps itself
        engine.backward(loss * config.gradient_accumulation)
        engine.step()

    return TorchProgram(engine, config, update=lambda: None, backward=backward)


@entry_point(single_process=True)
def main(arguments: list[str] | None = None) -> None:
    """Measure one program and print its times as a line of JSON."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", choices=[OURS, *TORCH, DEEPSPEED])
    parser.add_argument("--work", required=True, metavar="JSON", help="fields of PeerWork")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu"])
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    work = PeerWork(**json.loads(args.work))
    if args.program == OURS:
        times = measure_ours(work, args.device, args.started)
    else:
        times = measure_torch(args.program, work, args.device, args.started)
    print(json.dumps(asdict(times)))


if __name__ == "__main__":
    sys.exit(main())
