"""Measure a device: memory bandwidths, matmul FLOP/s, and training steps against their plans.

    python3 -m benchmarks.device --record runs/h100
    python3 -m benchmarks.device --peers runs/peers --llmq llmq/build/train
    python3 -m benchmarks.device --peers benchmarks/results --plan
    python3 -m benchmarks.device --config gptj_6B_gpu --runs 3

`--record DIR` measures a machine within nine minutes: bandwidths, the matrix rate, and large
presets beside their simulated steps. Each measurement is a process of its own, so one that fails
ends alone. The record is written after each and lists those for which no time was left. `--peers
DIR` compares training programs (`benchmarks.peers`), and `--peers DIR --plan` plans our rows
(`benchmarks.peer_plans`). Without them, one preset trains on generated
data with random weights, and one line of JSON is printed (`benchmarks.device_tasks`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import device_tasks, run_module
from files.atomic_writing import check_can_write_folder, write_text_atomically
from terminal.entry_point import entry_point
from terminal.parser import Parser
from terminal.screen import say

MINUTES = 9.0
_MIN_SECONDS = 20.0  # seconds; with less left, nothing is begun


@dataclass(frozen=True)
class TaskResult:
    """Metrics or error message of one measurement task.

    Attributes:
        seconds: time of the task, start and compilation included.
    """

    name: str
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


Task = tuple[str, Sequence[str]]
"""A name, and arguments of `benchmarks.device_tasks`."""


def list_tasks(presets: Sequence[str], fp8: Sequence[str], generating: Sequence[str]) -> list[Task]:
    """Returns the tasks that measure a device, the most important first."""
    trained = [
        (f"{preset}, {placement}", ["train", "--config", preset, "--set",
                                    f"execution.placement={placement}"])
        for placement in ("auto", "host")
        for preset in presets
    ]  # fmt: skip
    return [
        ("bandwidths", ["bandwidth"]),
        ("matrix rate", ["matrix"]),
        *([("matrix rate, FP8", ["matrix", "--fp8"])] if fp8 else []),
        *((f"{preset}, traced", ["trace", "--config", preset, "--set",
                                 "model.num_hidden_layers=4",
                                 "--set", "execution.placement=host"])
          for preset in presets[:1]),
        *trained,
        *((f"{preset}, CUDA graphs", ["train", "--config", preset, "--cuda-graphs"])
          for preset in presets[:1]),
        *((f"{preset}, FP8", ["train", "--config", preset]) for preset in fp8),
        *((f"{preset}, generation", ["generate", "--config", preset]) for preset in generating),
    ]  # fmt: skip


def run_in_process(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run a measurement task in a child process and return its metrics. Raises as `run_module`."""
    return run_module(["benchmarks.device_tasks", *arguments], timeout)


def record_tasks(
    folder: Path,
    tasks: Sequence[Task],
    extra: Sequence[str] = (),
    minutes: float = MINUTES,
    run: Callable[[Sequence[str], float], dict[str, Any]] = run_in_process,
) -> list[TaskResult]:
    """Run measurement tasks, and write record.json and record.md after each.

    Also writes machine.yml, which `--machine` takes, as soon as there are rates.

    Args:
        extra: further arguments of all tasks.
        minutes: for all of them.
    """
    end, done = time.monotonic() + 60 * minutes, list[TaskResult]()
    for name, arguments in tasks:
        left, start = end - time.monotonic(), time.monotonic()
        if left < _MIN_SECONDS:
            done.append(TaskResult(name, error="not begun, for lack of time"))
        else:
            try:
                metrics = run([*arguments, *extra], left)
                done.append(TaskResult(name, time.monotonic() - start, metrics))
            except (RuntimeError, TimeoutError, ValueError) as error:
                done.append(TaskResult(name, time.monotonic() - start, error=str(error)))
        say(format_line(done[-1]))
        text = json.dumps([asdict(each) for each in done], indent=1)
        write_text_atomically("the record", folder / "record.json", text + "\n")
        write_text_atomically("the record", folder / "record.md", format_table(done))
        if (machine := build_machine(done)) is not None:
            text = yaml.safe_dump(machine, sort_keys=False)
            write_text_atomically("the machine", folder / "machine.yml", text)
    return done


def build_machine(tasks_done: Sequence[TaskResult]) -> dict[str, Any] | None:
    """Returns a hardware entry for machines.yml with measured rates; None before the first rate."""
    fields: dict[str, Any] | None = None
    for metrics in (each.metrics for each in tasks_done):
        rates = metrics.get("measured", {})
        if "machine" in metrics:  # what both ways do at once is what a step asks for
            fields = metrics["machine"] | {"bandwidth": rates["memory"], "host_link": rates["both"]}
            fields["achieved"] = {"bandwidth": rates["memory"], "both_ways": rates["both"],
                               "host_link": min(rates["loads"], rates["stores"])}  # fmt: skip
        elif "of" in metrics and fields is not None:
            of = [metrics["of"], *(["float16"] if metrics["of"] == "bfloat16" else [])]
            measured = dict.fromkeys(of, rates["flops"])
            fields = fields | {name: fields[name] | measured for name in ("flops", "achieved")}
    return fields


def format_line(task: TaskResult) -> str:
    """Returns a one-line summary of a measurement task's result."""
    if task.error is not None:
        return f"{task.name}: {task.error}"
    shown = ", ".join(f"{k} {_format_number(v)}" for k, v in task.metrics["measured"].items() if v)
    planned = task.metrics.get("predicted", {}).get("seconds")
    simulated = "" if planned is None else f" (simulated: {planned:.3f} s)"
    return f"{task.name}: {shown}{simulated}"


def format_table(tasks_done: Sequence[TaskResult]) -> str:
    """Returns a Markdown table of measured and simulated seconds of the measured programs."""
    rows = ["| Measured | Seconds | Simulated | Ratio | Layers |", "|---|---|---|---|---|"]
    rest = []
    for each in tasks_done:
        seconds = each.metrics.get("measured", {}).get("seconds")
        if seconds is None:
            rest.append(f"- {format_line(each)}")
            continue
        planned = each.metrics["predicted"].get("seconds")
        ratio = "" if planned is None else f"{seconds / planned:.2f}"
        simulated = "" if planned is None else f"{planned:.3f}"
        rows.append(
            f"| {each.name} | {seconds:.3f} | {simulated} | {ratio} | {each.metrics['layers']} |"
        )
    return "\n".join([*rest, "", *rows, ""])


def _format_number(value: float) -> str:
    """Format a number with a suitable number of digits for a table cell."""
    return f"{value:.3e}" if value >= 1e4 else f"{value:.3f}"


def _record_from_arguments(arguments: Sequence[str]) -> None:
    """Parse the arguments of `--record`, run all tasks and print their results."""
    parser = Parser(description="Measure a machine within minutes.")
    parser.add_argument("--record", type=Path, required=True, metavar="DIR", help="where it goes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    parser.add_argument("--train", nargs="*", default=["gptj_6B_gpu", "xl_gpu"], metavar="PRESET")
    parser.add_argument("--fp8", nargs="*", default=["gptj_6B_gpu_fp8"], metavar="PRESET")
    parser.add_argument("--generate", nargs="*", default=["gptj_6B_gpu"], metavar="PRESET")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu", "tpu"])
    args = parser.parse_args(arguments)
    check_can_write_folder("the record to", args.record)
    args.record.mkdir(parents=True, exist_ok=True)
    tasks = list_tasks(args.train, args.fp8, args.generate)
    record_tasks(args.record, tasks, ["--device", args.device], args.minutes)
    print((args.record / "record.md").read_text(encoding="utf-8"))


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a device by one task, or record the results of all tasks."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    flags = {each.partition("=")[0] for each in args}
    if "--record" in flags:
        _record_from_arguments(args)
    elif "--peers" in flags:
        from benchmarks.peers import record_from_arguments

        record_from_arguments(args)
    else:
        device_tasks.run(["train", *args])


if __name__ == "__main__":
    sys.exit(main())
