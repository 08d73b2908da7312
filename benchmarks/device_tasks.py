"""Measurement tasks of `python3 -m benchmarks.device --record`, each in its own process.

    python3 -m benchmarks.device_tasks bandwidth
    python3 -m benchmarks.device_tasks train --config gptj_6B_gpu --set execution.placement=host

Prints one line of JSON: the measurement beside the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

import popxl
from benchmarks.device_trace import read_streams
from checkpoints.lazy_arrays import LazyArrays
from config.base import nest_by_path
from config.errors import UserError
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from config.sections import RunConfig
from data.loader import Loader
from modelling.devices import resolve_device_desc, resolve_platform
from modelling.model_family import get_family
from modelling.weights import WeightMap
from planning.hardware.local_machine import machine_from_table, measure_local_machine
from planning.hardware.machines import Machine, machine
from planning.hardware.matrix_rate import measure_matmul_rate
from planning.hardware.memory_check import (
    NotEnoughMemoryError,
    available_host_bytes,
    check_lower_bound,
)
from planning.report import make_report
from planning.requirements import Requirements, finetuning_requirements, generation_requirements
from popxl import hardware, ops
from popxl.session import DeviceDesc
from sessions.generation import GenerationSession
from sessions.training import TrainingSession
from terminal.entry_point import entry_point
from terminal.parser import Parser

_COLUMNS = 1024
_ENTRIES = 8  # that go each way in a run
_RUNS = 4
_SERIES = 3


@dataclass(frozen=True)
class Bandwidths:
    """Host transfer and memory bandwidths of a device in bytes/s, the best of several series.

    Attributes:
        loads, stores: from host memory to the device, and back, one way at a time.
        both: each way, when entries go both ways at once.
        memory: of device memory, read and written.
    """

    loads: float
    stores: float
    both: float
    memory: float

    @property
    def overlap(self) -> float:
        """Fraction of the shorter transfer direction that the other direction hides."""
        loads, stores, both = 1 / self.loads, 1 / self.stores, 1 / self.both
        return (loads + stores - both) / min(loads, stores)


def measure_bandwidths(device: DeviceDesc, mebibytes: int = 256) -> Bandwidths:
    """Measure a device's bandwidths to host memory and in its own memory.

    Args:
        mebibytes: size of an entry.
    """
    shape = (mebibytes * 2**20 // (4 * _COLUMNS), _COLUMNS)
    nbytes = 4 * shape[0] * shape[1]

    def transfer_rate(loads: bool, stores: bool) -> float:
        with popxl.Session(_transfer_program(shape, loads, stores), device) as session:
            return _ENTRIES * nbytes / _best_seconds(session)

    rows, columns = shape
    with popxl.Session(_device_memory_program((_ENTRIES * rows, columns)), device) as session:
        memory = 2 * _ENTRIES * nbytes / _best_seconds(session)
    return Bandwidths(
        transfer_rate(True, False), transfer_rate(False, True), transfer_rate(True, True), memory
    )


def _transfer_program(shape: tuple[int, int], loads: bool, stores: bool) -> popxl.Ir:
    """Returns a program that loads or stores remote-buffer entries, or does both at a time."""
    ir = popxl.Ir()
    with ir.main_graph:
        source, target = (popxl.remote_buffer(shape, popxl.float32, _ENTRIES) for _ in range(2))
        zeros = np.zeros(shape, np.float32)
        for i in range(_ENTRIES):
            popxl.remote_variable(zeros, source, i)
        x = popxl.variable(zeros)

        def transfer_step(
            i: popxl.Tensor, total: popxl.Tensor, x: popxl.Tensor
        ) -> list[popxl.Tensor]:
            value = ops.remote_load(source, i) if loads else x
            total = total + value[:1, :1]
            if stores:
                ops.remote_store(target, i, value + total)
            return [i + 1, total]

        first, total = popxl.constant(0, popxl.int32), x[:1, :1] + 1
        _, total = ops.repeat(
            ir.create_graph(transfer_step, first, total, x), _ENTRIES, first, total, x
        )
        ops.host_store(popxl.d2h_stream(total.shape, total.dtype), total)
    return ir


def _device_memory_program(shape: tuple[int, int]) -> popxl.Ir:
    """Returns a program that reads and writes an array of `shape` in device memory."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros(shape, np.float32))
        ops.var_updates.accumulate_(x, popxl.constant(1.0, popxl.float32))
    return ir


def _best_seconds(session: popxl.Session) -> float:
    """Returns the seconds per run in the fastest of several series, after a warm-up.

    All runs of a series are dispatched before they are awaited.
    """
    seconds = []
    for _ in range(_SERIES + 1):
        start = time.perf_counter()
        for _ in range(_RUNS):
            session.run()
        session.wait_until_idle()
        seconds.append((time.perf_counter() - start) / _RUNS)
    return min(seconds[1:])


Metrics = dict[str, Any]
CUDA_GRAPHS = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN"
_BLOCK = 2**20  # random numbers; weights repeat them


def measure_bandwidth_task(args: argparse.Namespace) -> Metrics:
    """Measure host transfers and device memory; also describes the machine as machines.yml does."""
    rates = measure_bandwidths(args.device, args.mebibytes)
    return {
        "measured": asdict(rates) | {"overlap": rates.overlap},
        "machine": _describe_machine(args.device),
    }


def _describe_machine(device: DeviceDesc) -> Metrics:
    """Returns the fields of `planning.hardware.machines.Machine` for the local machine."""
    fields, host = asdict(machine_from_table(device)), available_host_bytes()
    del fields["name"]
    fields |= {"title": f"{hardware.device_kinds(device, 1)[0]}, as measured"}
    return fields | ({} if host is None else {"host_memory": float(host)})


def measure_matmul_task(args: argparse.Namespace) -> Metrics:
    """Measure the FLOP/s of large matrix multiplications in bfloat16 or FP8."""
    rate = measure_matmul_rate(
        args.device, popxl.bfloat16, size=args.size, products=8, fp8=args.fp8
    )
    return {"measured": {"flops": rate}, "of": "float8" if args.fp8 else "bfloat16"}


def measure_training_task(args: argparse.Namespace) -> Metrics:
    """Measure an optimizer step of a preset."""
    if args.cuda_graphs:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CUDA_GRAPHS}"
    return _measure_largest_that_fits(args, "finetuning", _measure_training)


def measure_generation_task(args: argparse.Namespace) -> Metrics:
    """Measure a run of a preset's generation program."""
    return _measure_largest_that_fits(args, "inference", _measure_generation)


def _measure_largest_that_fits(
    args: argparse.Namespace, kind: str, measure: Callable[[RunConfig, int], Metrics]
) -> Metrics:
    """Measure a preset with all its layers; halves the number of layers until memory suffices."""
    config = _load_task_config(args, kind)
    while True:
        try:
            check_lower_bound(config)
            return measure(config, args.runs) | {"layers": config.model.num_hidden_layers}
        except NotEnoughMemoryError as error:
            if config.model.num_hidden_layers == 1:
                raise UserError(f"{args.config} {error}, with one layer") from error
            half = config.model.num_hidden_layers // 2
            config = config.with_values({config.model.field_path("num_hidden_layers"): half})


def _load_task_config(args: argparse.Namespace, kind: str) -> RunConfig:
    config_class = config_class_of_preset(load_preset(kind, args.config), args.config)
    values: dict[str, Any] = {"execution.device": args.device_name}
    for setting in args.set:
        name, _, value = setting.partition("=")
        section, _, field = name.partition(".")
        name = config_class().model.field_path(field) if section == "model" else name
        values[name] = yaml.safe_load(value)
    return load_config(config_class, kind, args.config, nest_by_path(values))


def _create_model_and_loader(config: RunConfig) -> tuple[TrainingSession, Loader]:
    """Returns a model with random weights, and a data loader of generated samples."""
    family, samples = get_family(config), 4 * config.training.global_batch_size
    model = TrainingSession(config)
    model.write(create_unscaled_random_weights(family.weight_map(config)))
    return model, Loader.from_config(
        config, family.sample_format.make_random_samples(config, samples, None)
    )


def _measure_training(config: RunConfig, runs: int) -> Metrics:
    on, start = _get_machine(config), time.perf_counter()
    model, loader = _create_model_and_loader(config)
    compiled = time.perf_counter() - start
    with model:
        # The second step is the first that updates behind the forward pass, and takes the pinned
        # memory for what it stores.
        seconds = [_train_step(model, loader, step) for step in range(runs + 2)][2:]
        with model.session.timing(synchronize=True) as apart:
            _train_step(model, loader, runs + 2)
    kinds = {kind: sum(getattr(part, kind).seconds for part in apart.parts.values())
             for kind in ("loads", "stores", "runs")}  # fmt: skip
    step, moving = statistics.median(seconds), kinds["loads"] + kinds["stores"]
    measured = {"seconds": step, "startup_seconds": compiled}
    measured |= {f"{kind}_apart": value for kind, value in kinds.items()}
    if moving:  # the fraction that takes no time of its own as it runs
        measured["hidden_transfers"] = min(max((apart.seconds - step) / moving, 0.0), 1.0)
    measured["peak_device_bytes"] = hardware.peak_device_bytes(
        resolve_device_desc(config), config.num_replicas
    )
    return {"measured": measured} | _plan_metrics(config, on, finetuning_requirements)


def measure_trace_task(args: argparse.Namespace) -> Metrics:
    """Measure how a GPU's streams are used in a training step, with the JAX profiler."""
    return _measure_largest_that_fits(args, "finetuning", _measure_streams)


def _measure_streams(config: RunConfig, runs: int) -> Metrics:
    on = _get_machine(config)
    model, loader = _create_model_and_loader(config)
    with model, TemporaryDirectory() as folder:
        for step in range(runs + 1):
            _train_step(model, loader, step)
        model.session.wait_until_idle()
        with hardware.profile_trace(folder):
            _train_step(model, loader, runs + 1)
            model.session.wait_until_idle()
        stream_times = read_streams(Path(folder))
    measured: Metrics = {"seconds": stream_times.seconds, "computing": stream_times.computing}
    for way, copies in (("loads", stream_times.loads), ("stores", stream_times.stores)):
        measured |= {f"{way}_{name}": value for name, value in asdict(copies).items()}
    metrics = {"measured": measured, "kernels": stream_times.kernels, "kinds": stream_times.kinds}
    return metrics | _plan_metrics(config, on, finetuning_requirements)


def _train_step(model: TrainingSession, loader: Loader, step: int) -> float:
    batch, start = loader.next_batch(), time.perf_counter()
    model.run([batch], [1e-4], step)
    return time.perf_counter() - start


def _measure_generation(config: RunConfig, runs: int) -> Metrics:
    family, on = get_family(config), _get_machine(config)
    model = GenerationSession(config)
    samples, length = model.samples_per_run, model.program.input_ids.shape[1]
    rng = np.random.default_rng(0)
    input_ids = rng.integers(2, config.model.vocab_size, (samples, length), np.int32)
    seconds = []
    with model:
        model.write(create_unscaled_random_weights(family.weight_map(config)))
        for _ in range(runs + 1):
            start = time.perf_counter()
            model.generate(input_ids, np.ones_like(input_ids))
            seconds.append(time.perf_counter() - start)
    return {"measured": {"seconds": statistics.median(seconds[1:])}} | _plan_metrics(
        config, on, generation_requirements
    )


def create_unscaled_random_weights(weight_map: WeightMap) -> LazyArrays:
    """Returns random weights by name; all repeat one block of random numbers, which is quick."""
    block = np.random.default_rng(0).normal(0, 0.02, _BLOCK).astype(np.float32)
    return LazyArrays({w.name: partial(np.resize, block, w.shape) for w in weight_map.weights})


def _plan_metrics(
    config: RunConfig,
    target_machine: Machine,
    requirements_fn: Callable[[RunConfig, str], Requirements],
) -> Metrics:
    """Returns a program's planned time and memory on a machine, to compare with measured ones."""
    plan_report = make_report("", requirements_fn(config, target_machine.target), target_machine)
    predicted: Mapping[str, Any] = {
        "bound": plan_report.seconds,
        "device_bytes": plan_report.device_bytes,
    }
    if plan_report.timeline is not None:
        predicted = {**predicted, "seconds": plan_report.timeline.seconds,
                 "computing": plan_report.timeline.compute_seconds,
                 "exposed_transfers": plan_report.timeline.exposed_transfers}  # fmt: skip
    return {"predicted": {**predicted, "machine": target_machine.name}}


def _get_machine(config: RunConfig) -> Machine:
    """Returns the local machine with the device memory that is free before the run."""
    return (
        machine("laptop")
        if resolve_platform(config) == "cpu"
        else measure_local_machine(config, None)
    )


TASKS: Mapping[str, Callable[[argparse.Namespace], Metrics]] = {
    "bandwidth": measure_bandwidth_task,
    "matrix": measure_matmul_task,
    "train": measure_training_task,
    "trace": measure_trace_task,
    "generate": measure_generation_task,
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of a measurement task."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--device", dest="device_name", default="auto")
    parser.add_argument("--config", default="tiny", metavar="PRESET")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=256, help="of an entry")
    parser.add_argument("--size", type=int, default=8192, help="rows of a matrix")
    parser.add_argument("--fp8", action="store_true", help="matrices in FP8")
    parser.add_argument("--cuda-graphs", action="store_true", help="let XLA record CUDA graphs")
    args = parser.parse_args(arguments)
    args.device = _get_device_desc(args.device_name)
    return args


def _get_device_desc(name: str) -> DeviceDesc:
    names: Mapping[str, DeviceDesc] = {"auto": "ipu_hw", "cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}
    return names[name]


def run(arguments: Sequence[str] | None = None) -> None:
    """Run one measurement task and print its metrics as JSON."""
    args = parse_arguments(arguments)
    print(json.dumps(TASKS[args.task](args)))


main = entry_point()(run)


if __name__ == "__main__":
    sys.exit(main())
