"""What is tried with damaged input: the scripts and the readers, as they are used.

What scripts import late is imported here, once, before any work is forked.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import popxl
import run_export
import run_finetuning
import run_generation
import run_inference
import run_validation
import terminal.entry_point
from config.llama import LlamaConfig
from config.presets import load_config
from config.sections import RunConfig
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.loader import Loader
from data.pipeline import Pipeline
from data.sample_format import SampleFormat
from data.seq2seq import SEQ2SEQ
from data.sources import FileSource
from data.task import SAMPLE_FOLDER, TASKS
from files.folder_lock import lock_folder
from modelling.model_family import get_family
from run.initial_state import InitialState
from run.records.metrics_jsonl import MetricsFile, read_metrics
from run.resume import resolve_initial_state
from run.weight_loading import load_weights
from terminal.entry_point import entry_point
from tests.small_runs import vocabulary

IMPORTED_LATE = [
    *(
        "planning.hardware.resource_errors",
        "planning.requirements",
        "planning.report_plot",
        "planning.report_text",
    ),
    *("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"),
    "transformers.models.t5.tokenization_t5",
]
for module in IMPORTED_LATE:
    importlib.import_module(module)

SCRIPTS = {
    "run_finetuning": run_finetuning.main,
    "run_validation": run_validation.main,
    "run_export": run_export.main,
    "run_generation": run_generation.main,
    "run_inference": run_inference.main,
}


class Accepted(BaseException):
    """What was given is good: the work itself would begin."""


def _accept(*_: object, **__: object) -> None:
    raise Accepted


# Messages are bounded here as they are written, not as they are cut for the screen.
terminal.entry_point.LONGEST = 10**9

# The work begins where weights and data are read; what is checked before stays.
training_samples = Pipeline.make_training_samples
Pipeline.make_training_samples = _accept
for module_of_work, loader in (
    ("answers.generate", "load_inference_weights"),
    ("evaluation.compare_with_hf", "load_weights"),
    ("evaluation.evaluate_checkpoint", "load_inference_weights"),
    ("hf_export", "load_weights"),
):
    module = importlib.import_module(f"run.{module_of_work}")
    assert hasattr(module, loader), "else nothing would stop the work"
    setattr(module, loader, _accept)


def command(
    script: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> int:
    """Run a script up to where its work would begin, with further environment variables."""
    os.environ.update(environment or {})
    try:
        return SCRIPTS[script](arguments)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except Accepted:
        return 0


def _as_a_script(work: Callable[[Path], None]) -> Callable[[str], int]:
    """`work` on a path, ending as a script ends."""

    def run(path: str) -> int:
        return entry_point()(lambda _: work(Path(path)))([])

    return run


def _config(path: Path) -> RunConfig:
    config = load_config(T5Config, "finetuning", str(path / "config.yml"))
    return replace(config, checkpoint=replace(config.checkpoint, load=str(path / "load")))


def _start(path: Path) -> None:
    """Start a run from `load`, with all its tensors, and its place in the data; say which."""
    config = _config(path)
    weight_map = get_family(config).weight_map(config)
    start, digest = resolve_initial_state(config, weight_map).load_with_fallback(_digest)
    if start.data is not None:
        loader = Loader(_Samples(), 4, seed=1)
        loader.restore(start.data)
        loader.next_batch()
    print(digest)


def _digest(start: InitialState) -> str:
    found = hashlib.sha256(repr((start.step, start.data)).encode())
    for name in start.tensors:
        found.update(name.encode() + start.tensors[name].tobytes())
    return found.hexdigest()


class _Samples:
    truncated = 0

    def __len__(self) -> int:
        return 10

    def take(self, indices: object) -> dict:
        return {}


def _weights(path: Path) -> None:
    config = _config(path)
    load_weights(config, get_family(config).weight_map(config)).load_with_fallback(
        lambda start: dict(start.tensors)
    )


def _metrics(path: Path) -> None:
    """Go on with metrics.jsonl."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        MetricsFile(path / "metrics.jsonl", first_step=1000).append({"step": 1000, "loss": 1.0})
    print(f"{len(read_metrics(path / 'metrics.jsonl'))} rows")


def _tokenizer(path: Path) -> None:
    data = {"family": "t5", "data": {"dataset": "sample", "tokenizer": str(path)}}
    config = T5Config.from_dict(data)
    list(Pipeline(config, SEQ2SEQ).tokenizer.encode(["mnli hypothesis: a b c", ""]))


def _rows(path: Path) -> None:
    """Read rows of one's own as those of the sample task."""
    task = replace(TASKS["sample"], sources={"train": FileSource(str(path))})
    print(len(task.read_corpus("train").examples))


def own(family: str, path: str) -> int:
    """Read a file of one's own for a model of a family, in whichever form its rows have."""

    def read(_: object) -> None:
        config_class, preset, tokenizer, shape = OWN[family]
        given = {
            "data": {"dataset": "mnli", "train": path, "tokenizer": str(SAMPLE_FOLDER / tokenizer)},
            "model": vocabulary(config_class, 640) | {"sequence_length": 128},
        }
        data = Pipeline(load_config(config_class, "finetuning", preset, given), shape)
        print(len(training_samples(data)))

    return entry_point()(read)([])


OWN: dict[str, tuple[type[RunConfig], str, str, SampleFormat]] = {
    "t5": (T5Config, "tiny", "t5_tokenizer", SEQ2SEQ),
    "llama": (LlamaConfig, "qwen3_tiny", "chat_tokenizer", CAUSAL_LM),
}


def session(environment: Mapping[str, str]) -> int:
    """Compile and run a program, with further environment variables."""
    os.environ.update(environment)

    def program(_: object) -> None:
        ir = popxl.Ir()
        with ir.main_graph:
            t = popxl.variable(np.ones(2, np.float32)) + 1.0
            out = popxl.d2h_stream(t.shape, t.dtype)
            popxl.ops.host_store(out, t)
        with popxl.Session(ir, device_desc="cpu") as running:
            print(running.run()[out])

    return entry_point()(program)([])


def _lock(path: Path) -> None:
    with lock_folder(path):
        pass


WORKS: dict[str, Callable[..., int | None]] = {
    "command": command,
    "start": _as_a_script(_start),
    "weights": _as_a_script(_weights),
    "metrics": _as_a_script(_metrics),
    "tokenizer": _as_a_script(_tokenizer),
    "rows": _as_a_script(_rows),
    "own": own,
    "session": session,
    "lock": _as_a_script(_lock),
}
