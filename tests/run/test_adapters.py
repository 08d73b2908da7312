"""Runs of adapters: what they save, and PEFT's files in both directions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import run_export
import run_generation
import run_validation
from checkpoints import load_checkpoint
from modelling import quantization
from run.records.metrics_jsonl import read_metrics
from tests import small_runs
from tests.modelling.peft_reference import PREFIX, with_peft
from tests.modelling.rounding import is_quantized
from tests.small_runs import BATCH, ENCODER_DECODERS, RATE, random_model

MODEL = ("--config", "gptj_tiny", "--layers", "1", "--hidden_size", "32", "--heads", "4")
TRAINING = (*MODEL, *BATCH, *RATE, "--dropout_prob", "0.1")
BESIDES, SAVED = "transformer.h.0.ln_1", "transformer.ln_f"
ADAPTER = (
    *("--adapter.rank", "3", "--adapter.targets", "q_proj", "v_proj", "fc_in", "out_proj"),
    *("--adapter.rslora", "--adapter.rank_pattern", "v_proj=2"),
    *("--adapter.modules_to_save", SAVED, "--training.trainable", "*ln_1"),
    *("--adapter.dropout", "0.1", "--learning_rate", "0.02"),
)


pytestmark = pytest.mark.usefixtures("few")


def train(folder: Path, *arguments: str, adapter: tuple[str, ...] = ADAPTER) -> int:
    return small_runs.train(folder, *TRAINING, *adapter, *arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face's form."""
    return random_model(tmp_path_factory.mktemp("model") / "base", *MODEL)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with its steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    best = ("--eval.steps", "2", "--eval.metrics", "loss")
    best += ("--checkpoint.keep_best", "loss")
    assert train(folder, "--load", str(base), "--steps", "4", *best) == 0
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "adapter"
    assert run_export.main(["--load", str(run), "--save-hf", str(folder)]) == 0
    return folder


def logits(model: torch.nn.Module) -> np.ndarray:
    input_ids = torch.arange(2, 26).reshape(2, 12)
    with torch.no_grad():
        return model(input_ids=input_ids).logits.numpy()


def model_in(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_step_holds_what_is_trained(run: Path, base: Path) -> None:
    tensors = load_checkpoint(run).tensors
    weights = [name for name in tensors if "/" not in name]
    whole = {name for name in weights if "lora_" not in name}
    assert whole == {f"{name}.{part}" for name in (SAVED, BESIDES) for part in ("weight", "bias")}
    assert "transformer.h.0.attn.q_proj.lora_A.weight" in weights
    size = sum(tensors[name].nbytes for name in weights)
    assert size < 0.5 * (base / "model.safetensors").stat().st_size


@pytest.mark.slow  # by default a run of test_frozen_base.py does
def test_a_run_continues_bit_for_bit(run: Path, base: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--load", str(base), "--steps", "2") == 0
    assert train(tmp_path / "run", "--load", str(base), "--steps", "4") == 0
    found, expected = (load_checkpoint(each).tensors for each in (tmp_path / "run", run))
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
    losses = [
        [row["loss"] for row in read_metrics(each / "metrics.jsonl")]
        for each in (tmp_path / "run", run)
    ]
    assert losses[0] == losses[1]


def test_peft_loads_what_is_written(run: Path, base: Path, exported: Path, tmp_path: Path) -> None:
    """PEFT's model computes the same as the merged model, and not as the base."""
    assert {file.name for file in exported.iterdir()} >= {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md")
    }
    settings = json.loads((exported / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == os.path.relpath(base, exported)
    assert settings["target_modules"] == ["fc_in", "out_proj", "q_proj", "v_proj"]
    assert (settings["r"], settings["rank_pattern"], settings["use_rslora"]) == (
        3,
        {"v_proj": 2},
        True,
    )
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["modules_to_save"] == [BESIDES, SAVED]
    model = peft.PeftModel.from_pretrained(model_in(base), exported).eval()
    own = load_checkpoint(run).tensors
    written = load_file(exported / "adapter_model.safetensors")
    assert {name.removeprefix(PREFIX) for name in written} == {n for n in own if "/" not in n}
    whole = tmp_path / "whole"
    assert run_export.main(["--load", str(run), "--merge", "--save-hf", str(whole)]) == 0
    merged = logits(model_in(whole))
    assert np.abs(merged - logits(model_in(base))).max() > 0.01
    np.testing.assert_allclose(logits(model), merged, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.quickly
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_peft_loads_what_is_written_of_an_encoder_decoder(kind: str, tmp_path: Path) -> None:
    flags = ENCODER_DECODERS[kind]
    base, folder = random_model(tmp_path / "base", *flags), tmp_path / "run"
    adapter = ("--adapter.rank", "3", "--adapter.targets", "all-linear", "--load", str(base))
    training = (*flags, *BATCH, *RATE, *adapter, "--learning_rate", "0.02", "--steps", "2")
    assert small_runs.train(folder, *training) == 0
    for name, merge in (("adapter", ()), ("whole", ("--merge",))):
        command = ["--load", str(folder), *merge, "--save-hf", str(tmp_path / name)]
        assert run_export.main(command) == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_2_SEQ_LM"
    read = transformers.AutoModelForSeq2SeqLM.from_pretrained
    input_ids = torch.arange(2, 26).reshape(2, 12)
    plain, whole = (read(tmp_path / name).eval() for name in ("base", "whole"))
    model = peft.PeftModel.from_pretrained(read(base), tmp_path / "adapter").eval()
    assert not [name for name, _ in model.named_parameters() if "lora" in name and "vision" in name]
    if kind == "t5gemma2":  # whose file leaves modules out
        again = ["--load", str(base), "--adapter.load", str(tmp_path / "adapter"), "--merge"]
        assert run_export.main([*again, "--save-hf", str(tmp_path / "again")]) == 0
        files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again")]
        assert all(np.array_equal(files[1][name], x) for name, x in files[0].items())
    with torch.no_grad():
        before, merged, found = (
            one(input_ids=input_ids, decoder_input_ids=input_ids[:, :4]).logits.numpy()
            for one in (plain, whole, model)
        )
    assert np.abs(merged - before).max() > 0.01
    np.testing.assert_allclose(found, merged, rtol=1e-4, atol=1e-5)


def test_no_file_of_an_adapter_names_a_folder_of_this_machine(base: Path, exported: Path) -> None:
    for file in exported.iterdir():
        for place in (base.parent, Path.home(), Path.cwd()):
            assert str(place).encode() not in file.read_bytes(), file.name


def test_the_program_in_the_card_of_an_adapter_runs(exported: Path, monkeypatch, capsys) -> None:
    card = (exported / "README.md").read_text()
    program = card.partition("```python\n")[2].partition("\n```")[0]
    monkeypatch.chdir(exported)
    exec(program, found := dict[str, Any]())
    assert isinstance(found["model"], peft.PeftModel)
    assert found["model"].active_adapter == "default"
    assert capsys.readouterr().out.strip()


def test_a_base_with_its_adapter_answers_as_the_run(
    run: Path, base: Path, exported: Path, capsys
) -> None:
    losses, answers = [], []
    for_run = (*ADAPTER, "--load", str(run))
    for names in (for_run, ("--load", str(base), "--adapter.load", str(exported))):
        few = ["--micro_batch_size", "8", "--eval.metrics", "loss"]
        few += ["--eval.samples", "8", "--out", str(exported.parent / "out")]
        assert run_validation.main([*MODEL, *names, *few]) == 0
        report = json.loads((exported.parent / "out" / "eval.json").read_text())
        losses.append(report["loss"])
        capsys.readouterr()
        more = ["a lamp", "the kitchen is", "premise: Nina", "--generation.max_tokens", "8"]
        assert run_generation.main([*MODEL, *names, *more]) == 0
        answers.append(capsys.readouterr().out)
    assert losses[0] == losses[1]
    assert answers[0] == answers[1]
    assert answers[0].strip()


def test_a_run_begins_with_an_adapter_of_peft(base: Path, tmp_path: Path) -> None:
    """Its first loss is peft's, at a rate that changes nothing."""
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 5, "lora_dropout": 0.1}
    settings |= {
        "target_modules": r".*h\.0\.(attn\.[kv]_proj|mlp\.fc_out)",
        "alpha_pattern": {"k_proj": 3},
    }
    model = with_peft(model_in(base), **settings, task_type="CAUSAL_LM")
    model.save_pretrained(tmp_path / "adapter")
    given = ("--load", str(base), "--adapter.load", str(tmp_path / "adapter"))
    still = ("--learning_rate", "1e-30", "--adapter.dropout", "0", "--steps", "2")
    assert train(tmp_path / "run", *given, *still, adapter=()) == 0
    found = load_checkpoint(tmp_path / "run")
    assert found.metadata["config"]["adapter"]["rank"] == 2
    expected = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, array in expected.items():
        np.testing.assert_allclose(found.tensors[name.removeprefix(PREFIX)], array, rtol=1e-6)
    whole = tmp_path / "whole"
    run = str(tmp_path / "run")
    assert run_export.main(["--load", run, "--merge", "--save-hf", str(whole)]) == 0
    np.testing.assert_allclose(logits(model_in(whole)), logits(model), rtol=1e-4, atol=1e-5)


def test_a_run_that_is_done_writes_its_adapter(
    run: Path, base: Path, exported: Path, tmp_path: Path
) -> None:
    given = ("--load", str(base), "--steps", "4", "--save-hf", str(tmp_path / "out"))
    assert train(run, *given) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes()
    assert "Adapters of rank 3 were trained with PopXL" in (exported / "README.md").read_text()


IN_4_BITS = ("--quantization", "int4", "--model.quantization_group_size", "8")


def test_a_base_in_4_bits(base: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The base is quantized once; evaluations and the resumed run read the same weights."""
    few = ("--eval.steps", "2", "--eval.samples", "8", "--eval.metrics", "loss")
    given = ("--load", str(base), *IN_4_BITS, *few)
    assert train(tmp_path / "run", *given, "--steps", "2") == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "run" / "packed").iterdir()}
    weights = load_file(base / "model.safetensors")
    assert 4.5 / 8 <= sum(map(len, kept.values())) / sum(map(quantised_size, weights.items())) < 1.2
    monkeypatch.setattr(quantization, "group_quantize_compress_numpy", None)
    assert train(tmp_path / "run", *given, "--steps", "4") == 0
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "packed").iterdir()} == kept
    monkeypatch.undo()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["loss"] > 0 for row in rows)
    assert rows[-1]["eval_loss"] > 0
    prompt = ["a lamp", "--generation.max_tokens", "4"]
    assert run_generation.main(["--load", str(tmp_path / "run"), *prompt]) == 0
    merge = ("--merge", "dequantized", "--save-hf", str(tmp_path / "whole"))
    assert run_export.main(["--load", str(tmp_path / "run"), *merge]) == 0
    assert "merged into what is left in 4 bits of the weights of" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_share_a_base_in_4_bits(base: Path, tmp_path: Path, monkeypatch) -> None:
    """The second one quantises nothing, and none has a copy of its own."""
    given = (
        "--load",
        str(base),
        *IN_4_BITS,
        "--execution.quantized_cache",
        str(tmp_path / "shared"),
    )
    assert train(tmp_path / "first", *given, "--steps", "1") == 0
    monkeypatch.setattr(quantization, "group_quantize_compress_numpy", None)
    assert train(tmp_path / "second", *given, "--steps", "1", "--seed", "7") == 0
    assert list((tmp_path / "shared").iterdir())
    assert not [*tmp_path.glob("*/packed")]


def quantised_size(named: tuple[str, np.ndarray]) -> int:
    return named[1].size if is_quantized(*named) else 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--load", "{base}", "--merge"), "--merge is for models with adapters, but what --load"),
        (
            ("--load", "{run}", "--merge", "dequantized"),
            "--merge dequantized is for adapters of weights",
        ),
        (("--load", "{run}", "--adapter.load", "{exported}"), "has adapters of its own: leave out"),
        (("--load", "{base}", "--adapter.load", "{base}"), "no adapter in {base}: give a folder"),
        (
            ("--load", "{base}", "--adapter.load", "{exported}", "--adapter.rank", "9"),
            "adapter.rank is 3 in {exported}, not 9: leave it out",
        ),
    ],
)
def test_what_is_refused(arguments, said, run, base, exported, tmp_path, capsys) -> None:
    names = {"run": run, "base": base, "exported": exported}
    given = [argument.format(**names) for argument in arguments]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 2
    assert said.format(**names) in capsys.readouterr().err


def test_an_adapter_of_another_model_is_refused(base, exported, tmp_path, capsys) -> None:
    other = [*MODEL, "--layers", "2", "--load", "random", "--save-hf", str(tmp_path / "base")]
    assert run_export.main(other) == 0
    command = ["--load", str(tmp_path / "base"), "--adapter.load", str(exported)]
    assert run_export.main([*command, "--save-hf", str(tmp_path / "out")]) == 2
    assert "belong to a model of another kind or size" in capsys.readouterr().err
