"""Model card of an export: README.md with data, hyperparameters, metrics and loss curve."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints import has_checkpoint
from config.base import flatten_by_path
from config.objectives import METRICS as METRIC_NAMES
from config.run import RANDOM
from data.file_readers import READERS
from data.sample_format import SampleFormat
from files.errors import FileError
from files.formatting import format_number
from files.json_files import read_json_object
from files.run_folder import RunFolder
from files.yaml_files import dump_yaml
from huggingface.model_card_text import CURVE, FILE_NAME, AdapterInfo, ModelCard, TableRows
from run.records.loss_curve import draw_loss_curve
from run.records.metrics_jsonl import StepMetrics, read_metrics
from run.records.progress import EVAL_PREFIX
from run.records.run_json import read_sessions

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_BUILT_IN = {"mnli": ("nyu-mll/glue", "GLUE/MNLI"), "sample": (None, "the sample corpus")}
_TRAINING = {
    "optimizer steps": "training.steps",
    "samples a step": "training.global_batch_size",
    "optimizer": "training.optimizer.name",
    "learning rate": "training.optimizer.learning_rate.maximum",
    "schedule": "training.optimizer.learning_rate.function",
    "weight decay": "training.optimizer.weight_decay",
    "gradient clipping": "training.optimizer.gradient_clipping",
    "precision": "model.precision",
    "sequence length": "model.sequence_length",
    "dropout": "model.dropout_prob",
    "seed": "model.seed",
}
"""Rows of the training table, with their config fields."""


@dataclass(frozen=True)
class RunRecords:
    """Config and files, such as metrics.jsonl, of the run that trained some weights.

    Attributes:
        config: the run's config as data.
        step: number of optimizer steps of the weights.
        folder: folder with the run's records, if there are any.
    """

    config: Mapping[str, Any]
    step: int
    folder: RunFolder

    @classmethod
    def from_checkpoint(cls, load: str, step: int, config: Mapping[str, Any]) -> RunRecords:
        """Find the records of the run that saved a checkpoint, up to two folders above it."""
        path = Path(load)
        places = [RunFolder(place) for place in (path, path.parent, path.parent.parent)]
        with_metrics = (place for place in places if place.metrics_file.is_file())
        return cls(config, step, next(with_metrics, places[0]))

    @property
    def metrics(self) -> list[StepMetrics]:
        """Metrics of all training steps up to the step of the weights."""
        try:
            rows = read_metrics(self.folder.metrics_file)
        except OSError:
            return []
        return [row for row in rows if row["step"] <= self.step]

    def eval_metrics(self) -> dict[str, float]:
        """Evaluation metrics of the weights: from eval.json, else from the last evaluation."""
        try:
            report = read_json_object(self.folder.eval_json).data
        except (FileError, OSError):
            report = {}
        if report.get("step") == self.step:
            return {n: v for n in METRIC_NAMES if isinstance(v := report.get(n), int | float)}
        for row in reversed(self.metrics):
            metrics = {n: row[EVAL_PREFIX + n] for n in METRIC_NAMES if EVAL_PREFIX + n in row}
            if metrics:
                return metrics
        return {}


def write_model_card(
    folder: Path,
    name: str,
    sample_format: SampleFormat,
    load: str | None,
    run: RunRecords | None,
    adapter: AdapterInfo | None = None,
    num_labels: int | None = None,
    embeds: bool = False,
) -> None:
    """Write the model card (README.md) and the loss curve to an export folder.

    Args:
        folder: folder of the exported model.
        name: name of the model.
        load: the Hugging Face model that the weights are from, if they are from no run.
        adapter: base model of the adapter in the folder; None: the folder has a full model.
        num_labels: scores of a classifier; None: a language model.
        embeds: True for a model of embeddings.
    """
    sequence_to_sequence = sample_format.name == "seq2seq"
    if run is None:
        card = ModelCard(name, sequence_to_sequence, *_describe_base(load), adapter=adapter)
    else:
        rows = run.metrics
        if rows:
            draw_loss_curve(rows, folder / CURVE, name)
        card = replace(_run_card(name, sequence_to_sequence, run, bool(rows)), adapter=adapter)
    card = replace(card, num_labels=num_labels, embeds=embeds)
    (folder / FILE_NAME).write_text(card.render_markdown(), encoding="utf-8")


def _run_card(name: str, sequence_to_sequence: bool, run: RunRecords, curve: bool) -> ModelCard:
    flat = flatten_by_path(run.config)
    hub, data = _describe_data(flat)
    return ModelCard(
        name,
        sequence_to_sequence,
        *_describe_base(flat.get("checkpoint.load")),
        datasets=hub,
        evaluated_on=data.get("validation", data["training"]),
        metrics=run.eval_metrics(),
        prompt=flat.get("data.prompt"),
        target=flat.get("data.target"),
        chat=flat.get("data.format") == "conversational",
        trained=_describe_trained(flat),
        data=data,
        training=_training_table(flat, run),
        sessions=_session_tables(run),
        settings=dump_yaml(_without_paths(run.config)),
        curve=curve,
    )


def _describe_trained(flat: Mapping[str, Any]) -> str:
    if rank := flat.get("adapter.rank"):
        return f"Adapters of rank {rank} were trained"
    is_partial = flat.get("training.trainable") or flat.get("training.frozen")
    return f"{'Some' if is_partial else 'All'} parameters were fine-tuned"


def _describe_base(load: str | None) -> tuple[str, str | None]:
    """Return text on the weights that training started from, and their name on the hub or None."""
    if load is None or load == RANDOM:
        return "random weights", None
    if has_checkpoint(load):
        return f"the run {Path(load).resolve().name}", None
    if Path(load).exists() or not _HUB_NAME.fullmatch(load):
        return f"the model in the folder {Path(load).name}", None
    return load, load


def _describe_data(flat: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the data sets' names on the hub, and a Markdown table that describes the data.

    Of local files only names are given, no paths.
    """
    hub: list[str] = []
    rows: dict[str, str] = {}
    for title, field in (("training", "data.train"), ("validation", "data.validation")):
        source = flat.get(field)
        if source is None:
            hub_name, text = _BUILT_IN.get(flat.get("data.dataset", ""), (None, ""))
            hub_name = None if flat.get("data.train") else hub_name
            text = "" if flat.get("data.train") else text
        else:
            hub_name, text = _hub_and_display_name(str(source))
        hub += [hub_name] if hub_name and hub_name not in hub else []
        rows |= {title: text} if text else {}
    for title, field in (
        ("prompt", "data.prompt"),
        ("target", "data.target"),
        ("labels", "data.class_labels"),
        ("format", "data.format"),
        ("loss on", "data.loss_on"),
        ("system message", "data.system"),
    ):
        rows |= {title: str(flat[field])} if flat.get(field) else {}
    return hub, {"training": "unknown"} | rows


def _hub_and_display_name(source: str) -> tuple[str | None, str]:
    """Return a data source's name on the hub or None, and its name in the model card."""
    path = source.partition("@")[0].partition(":")[0]
    is_file = Path(source).exists() or any(path.removesuffix(".gz").endswith(s) for s in READERS)
    if not is_file and _HUB_NAME.fullmatch(path):
        return path, source
    return None, ", ".join(Path(part.strip()).name for part in source.split(","))


def _training_table(flat: Mapping[str, Any], run: RunRecords) -> TableRows:
    values = {title: flat.get(field) for title, field in _TRAINING.items()}
    table = {title: str(value) for title, value in values.items() if value is not None}
    if table.get("optimizer steps") != str(run.step):
        table["optimizer steps"] = (
            f"{run.step} of {table.get('optimizer steps', 'an unknown number')}"
        )
    if flat.get("model.precision") != "float32":
        table["16-bit weights"] = _describe_rounding(flat)
    rows = run.metrics
    if rows:
        table["training loss, last step"] = format_number(rows[-1].get("loss", float("nan")))
    return table


def _describe_rounding(flat: Mapping[str, Any]) -> str:
    if flat.get("execution.master_weights"):
        return "with float32 masters"
    stochastic = flat.get("training.stochastic_rounding")
    return "rounded to nearest" if stochastic is False else "rounded stochastically"


def _session_tables(run: RunRecords) -> list[TableRows]:
    """Return a table for each start or resume of the run: step, hardware, command, versions."""
    by_session: list[TableRows] = []
    for session in read_sessions(run.folder):
        if session.first_step >= run.step:
            continue
        facts = {"from step": str(session.first_step), "hardware": session.hardware}
        facts |= {"command": _shorten_paths(session.command)} if session.command else {}
        software = ", ".join(f"{name} {number}" for name, number in session.versions.items())
        by_session.append(facts | {"software": software})
    return by_session


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without local folder paths."""
    sections = {name: section for name, section in config.items() if name != "checkpoint"}
    for section, names in (
        ("data", ("train", "validation", "tokenizer")),
        ("execution", ("disk",)),
    ):
        source = dict(sections.get(section, {}))
        source |= {
            n: _hub_and_display_name(str(source[n]))[1] for n in names if source.get(n) is not None
        }
        sections[section] = source
    return sections


def _shorten_paths(command: str) -> str:
    """Shorten absolute paths in a command line to file names, for the model card."""
    words = (Path(part).name if part.startswith("/") else part for part in shlex.split(command))
    return shlex.join(words)
