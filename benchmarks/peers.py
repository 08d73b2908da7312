"""Comparison of training programs on one machine, within minutes: `benchmarks.device --peers`.

Each program is a process of its own with a time limit. The record is written after each, with the
power and the clocks of the GPU while it ran; what no time was left for is listed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import ERROR_CHARACTERS, run_module
from benchmarks.llmq import MODEL_TYPES, LlmqError, measure_llmq
from benchmarks.peer_programs import DEEPSPEED, LLMQ, OURS, TORCH, PeerWork
from config.errors import UserError
from files.atomic_writing import check_can_write_folder, write_text_atomically
from huggingface.pytorch_bin_files import has_torch
from terminal.parser import Parser
from terminal.screen import say

MINUTES = 12.0
LONGEST = 150.0  # seconds of a program
_MIN_SECONDS = 20.0  # seconds; with less left, nothing is begun
_QUERY = "power.draw,clocks.sm,clocks.mem"


def _qwen(
    layers: int, hidden: int, inner: int, heads: int, groups: int, micro: int
) -> dict[str, Any]:
    """Returns the settings of a Qwen2.5 model beside those of the preset `qwen3_0_6B`."""
    return {
        "model.model_type": "qwen2",
        "model.num_hidden_layers": layers,
        "model.hidden_size": hidden,
        "model.intermediate_size": inner,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": groups,
        "model.max_position_embeddings": 32768,
        "execution.micro_batch_size": micro,
    }


SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen2.5 1.5B": ("qwen3_0_6B", _qwen(28, 1536, 8960, 12, 2, 16)),
    "Qwen2.5 3B": ("qwen3_0_6B", _qwen(36, 2048, 11008, 16, 2, 16)),
    "Qwen2.5 7B": (
        "qwen3_0_6B",
        _qwen(28, 3584, 18944, 28, 4, 8)
        | {"model.vocab_size": 152064, "model.tie_word_embeddings": False},
    ),
    "GPT-J 6B": ("gptj_6B_gpu", {}),
    "FLAN-T5 XL": ("xl_gpu", {"execution.micro_batch_size": 32}),
}
"""Presets, and the settings that differ, by model; model cards of Hugging Face.

Micro-batches are those with which steps are planned to be short on an H100 and an H200.
"""

TINY_SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tiny Qwen2.5": (
        "qwen3_tiny", {"model.model_type": "qwen2", "execution.micro_batch_size": 4},
    ),
    "tiny GPT-J": ("gptj_tiny", {"execution.micro_batch_size": 4}),
    "tiny T5": ("tiny", {"execution.micro_batch_size": 4}),
}  # fmt: skip
SMALL_MOMENTS = {"training.optimizer.state": "bfloat16"}
"""Settings of ours with moments as those of torch and LLMQ; sums of gradients are float32."""

SAME_STATE = {**SMALL_MOMENTS, "training.gradient_dtype": "bfloat16"}
"""Settings of ours with which its state is as large as that of torch and LLMQ."""

LARGER_MICRO_BATCHES = (PeerWork("GPT-J 6B", "gptj_6B_gpu", {"execution.micro_batch_size": 16}),)
"""Work of ours that is only planned: an H200 has room for it, an H100 is slower with it."""

PeerRun = tuple[str, PeerWork]
"""A program, and what it does."""


@dataclass(frozen=True)
class PeerRow:
    """Result or error of one program.

    Attributes:
        seconds: of the whole process.
        gpu: medians and extremes of power (W) and clocks (MHz); None without nvidia-smi.
    """

    program: str
    model: str
    packed: bool
    tokens_asked: int
    seconds: float = 0.0
    times: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, float] | None = None
    error: str | None = None


def list_peer_runs(tiny: bool, has_llmq: bool) -> list[PeerRun]:
    """Returns the runs to measure, the most important first."""
    shapes = TINY_SHAPES if tiny else SHAPES
    small, large = (512, 1024) if tiny else (131_072, 524_288)
    steps = 1 if tiny else 3

    def work(model: str, tokens: int = small, packed: bool = False, **more: Any) -> PeerWork:
        preset, fields = shapes[model]
        return PeerWork(model, preset, {**fields, **more}, tokens, packed, steps)

    names = list(shapes)
    decoders = [name for name in names if "T5" not in name]
    main = [names[0], *names[2:], *names[1:2]] if not tiny else names
    torch_first, *torch_rest = TORCH
    peer_runs = [(program, work(model)) for model in main for program in (OURS, LLMQ, torch_first)]
    peer_runs += [(OURS, work(model, **SAME_STATE)) for model in decoders]
    peer_runs += [(p, work(names[0], packed=True)) for p in (OURS, LLMQ, torch_first)]
    peer_runs += [(p, work(model)) for p in torch_rest[:2] for model in main]
    peer_runs += [(p, work(names[0], large)) for p in (OURS, LLMQ, torch_first)]
    peer_runs += [(p, work(model)) for p in (torch_rest[2], DEEPSPEED) for model in main]
    peer_runs += [(OURS, work(model, **SMALL_MOMENTS)) for model in decoders]
    peer_runs += [(p, work(m, large)) for m in main[1:] for p in (OURS, LLMQ, torch_first)]
    peer_runs += [
        (p, work(m, packed=True)) for m in decoders[1:] for p in (OURS, LLMQ, torch_first)
    ]
    return [c for c in peer_runs if c[0] != LLMQ or (has_llmq and can_run_in_llmq(c[1]))]


def can_run_in_llmq(work: PeerWork) -> bool:
    """True if LLMQ has the model's architecture."""
    return work.fields.get("model.model_type") in MODEL_TYPES


def missing_programs() -> dict[str, str]:
    """Returns the programs that are not installed, with what installs them."""
    missing = {} if has_torch() else dict.fromkeys(TORCH, "pip install -r requirements-dev.txt")
    if find_spec("deepspeed") is None:
        missing[DEEPSPEED] = "pip install deepspeed"
    return missing


def run_program(
    peer_run: PeerRun, device: str, llmq: Path | None, timeout: float
) -> dict[str, Any]:
    """Run one program in a process of its own; returns its times. Raises as `run_module`."""
    program, work = peer_run
    if program == LLMQ:
        assert llmq is not None
        with TemporaryDirectory() as folder:
            return measure_llmq(llmq, work, Path(folder), timeout)
    arguments = ["--work", work.to_json(), "--device", device, "--started", str(time.time())]
    return run_module(["benchmarks.peer_programs", program, *arguments], timeout)


class GpuLog:
    """Context that samples power and clocks of the GPU with nvidia-smi, twice a second."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.summary: dict[str, float] | None = None

    def __enter__(self) -> GpuLog:
        command = [
            "nvidia-smi",
            f"--query-gpu={_QUERY}",
            "--format=csv,noheader,nounits",
            "-lms",
            "500",
        ]
        with suppress(OSError):
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self.summary = summarize_samples(self._process.communicate()[0].splitlines())


def summarize_samples(lines: Iterable[str]) -> dict[str, float] | None:
    """Returns medians and extremes of the samples under load: those of at least half the power."""
    rows = []
    for line in lines:
        with suppress(ValueError):  # a value that the GPU does not tell
            watts, core, memory = map(float, line.split(","))
            rows.append((watts, core, memory))
    if not rows:
        return None
    most = max(row[0] for row in rows)
    watts, core, memory = zip(*(row for row in rows if row[0] >= most / 2), strict=True)
    return {
        "watts": statistics.median(watts),
        "max_watts": most,
        "sm_mhz": statistics.median(core),
        "min_sm_mhz": min(core),
        "memory_mhz": statistics.median(memory),
    }


def record_peers(
    folder: Path,
    peer_runs: Sequence[PeerRun],
    minutes: float,
    run: Callable[[PeerRun, float], dict[str, Any]],
    missing: Mapping[str, str] | None = None,
    max_seconds: float = LONGEST,
) -> list[PeerRow]:
    """Run programs in order until the time is over; writes peers.json and peers.md after each."""
    end, rows = time.monotonic() + 60 * minutes, list[PeerRow]()
    for peer_run in peer_runs:
        program, work = peer_run
        row = {"program": _label(peer_run), "model": work.model, "packed": work.packed}
        row["tokens_asked"] = work.tokens
        left, start = end - time.monotonic(), time.monotonic()
        if (missing or {}).get(program):
            rows.append(PeerRow(**row, error=f"not installed: {(missing or {})[program]}"))
        elif left < _MIN_SECONDS:
            rows.append(PeerRow(**row, error="not begun, for lack of time"))
        else:
            with GpuLog() as log:
                try:
                    result: dict[str, Any] = {"times": run(peer_run, min(left, max_seconds))}
                except (RuntimeError, TimeoutError, ValueError, OSError, LlmqError) as error:
                    result = {"error": str(error)[-ERROR_CHARACTERS:]}
            seconds = time.monotonic() - start
            rows.append(PeerRow(**row, seconds=seconds, gpu=log.summary, **result))
        say(format_row(rows[-1]))
        text = json.dumps([asdict(each) for each in rows], indent=1)
        write_text_atomically("the record", folder / "peers.json", text + "\n")
        write_text_atomically("the record", folder / "peers.md", format_peers(rows))
    return rows


def _label(peer_run: PeerRun) -> str:
    """Returns a program's name with its state, where that is not the usual one."""
    program, work = peer_run
    for text, fields in (("state", SAME_STATE), ("moments", SMALL_MOMENTS)):
        if fields.items() <= work.fields.items():
            return f"{program}, bfloat16 {text}"
    return program


def format_row(row: PeerRow) -> str:
    """Returns a one-line summary of a program's result."""
    what = f"{row.model}{', packed' if row.packed else ''}, {row.tokens_asked:,} tokens"
    if row.error is not None:
        return f"{what}, {row.program}: {row.error}"
    tokens_per_second = row.times["tokens"] / row.times["seconds"]
    return f"{what}, {row.program}: {row.times['seconds']:.3f} s, {tokens_per_second:,.0f} tokens/s"


def format_peers(rows: Sequence[PeerRow]) -> str:
    """Returns a Markdown table of all programs that ran, and a list of the others."""
    head = (
        "| Model | Tokens | Program | Step, s | Tokens/s, no padding | First step after, s "
        "| Power, W | SM clock, MHz | Precision and state |"
    )
    lines, rest = [head, "|---|---|---|---|---|---|---|---|---|"], []
    for row in rows:
        if row.error is not None:
            rest.append(f"- {format_row(row)}")
            continue
        times, gpu = row.times, row.gpu or {}
        cells = [
            f"{row.model}{', packed' if row.packed else ''}",
            f"{times['tokens']:,}",
            row.program,
            f"{times['seconds']:.3f}",
            f"{times['tokens'] / times['seconds']:,.0f}",
            f"{times['first_step']:.1f}",
            *(f"{gpu[name]:.0f}" if name in gpu else "" for name in ("watts", "sm_mhz")),
            times["state"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *rest, ""])


def record_from_arguments(arguments: Sequence[str]) -> None:
    """Parse the arguments of `--peers`, run all programs and print their table."""
    parser = Parser(description="Compare training programs on this machine within minutes.")
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="where it goes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds of one program")
    parser.add_argument("--llmq", type=Path, metavar="PATH", help="LLMQ's binary, `train`")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU")
    parser.add_argument("--models", nargs="*", metavar="MODEL", help="of the table alone")
    parser.add_argument("--programs", nargs="*", metavar="PROGRAM", help="alone")
    parser.add_argument(
        "--plan", action="store_true", help="simulate our steps, without a device, and stop"
    )
    parser.add_argument(
        "--machine", nargs="*", metavar="NAME", help="to plan for (default: h100 h200)"
    )
    args = parser.parse_args(arguments)
    _check_arguments(parser, args)
    check_can_write_folder("the record to", args.peers)
    args.peers.mkdir(parents=True, exist_ok=True)
    peer_runs = _chosen_runs(args)
    if args.plan:
        from benchmarks.peer_plans import MACHINES, format_plans, record_plans

        works = [work for program, work in peer_runs if program == OURS]
        models = {work.model for work in works}
        works += [work for work in LARGER_MICRO_BATCHES if work.model in models]
        print(format_plans(record_plans(args.peers, works, args.machine or MACHINES)))
        return
    device = "cpu" if args.tiny else "auto"
    record_peers(
        args.peers,
        peer_runs,
        args.minutes,
        lambda peer_run, timeout: run_program(peer_run, device, args.llmq, timeout),
        missing_programs(),
        args.longest,
    )
    print((args.peers / "peers.md").read_text(encoding="utf-8"))


def _check_arguments(parser: Parser, args: argparse.Namespace) -> None:
    """Check that all arguments take effect.

    Raises:
        UserError: one does not, or names what is not there.
    """
    if args.llmq is not None and not args.llmq.is_file():
        raise UserError(f"--llmq: there is no file {args.llmq}; give the path of LLMQ's `train`")
    if args.plan:
        for name in ("llmq", "minutes", "longest", "programs"):
            if getattr(args, name) != parser.get_default(name):
                raise UserError(f"--{name} is for measured programs: leave it out beside --plan")
    elif args.machine is not None:
        raise UserError("--machine is for plans: give --plan too, or leave it out")


def _chosen_runs(args: argparse.Namespace) -> list[PeerRun]:
    """Returns the runs of the models and programs that the arguments name.

    Raises:
        UserError: there is no such model or program.
    """
    peer_runs = list_peer_runs(args.tiny, args.llmq is not None)
    for name, chosen, known in (
        ("models", args.models, {work.model for _, work in peer_runs}),
        ("programs", args.programs, {OURS, LLMQ, *TORCH, DEEPSPEED}),
    ):
        if unknown := set(chosen or ()) - known:
            there = ", ".join(sorted(known))
            raise UserError(f"--{name}: there is no {unknown.pop()!r}; there are: {there}")
    return [
        (program, work)
        for program, work in peer_runs
        if (args.models is None or work.model in args.models)
        and (args.programs is None or program in args.programs)
    ]
