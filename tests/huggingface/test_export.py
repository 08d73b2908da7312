"""A model that was exported: transformers answers as we do, example by example, in any layout.

The short tests take random weights and part of the validation set; the slow one (six minutes on
two cores) trains the tiny models as their presets say, and takes all of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import run_export
import run_finetuning
from checkpoints import CheckpointStore
from config.families import FAMILIES
from config.sections import RunConfig
from data.task import NLI_LABELS
from data.tokenizer import Tokenizer as RunTokenizer
from files.json_files import read_json_object
from modelling.model_family import get_family, load_family
from run.evaluation.eval_result import EvalResult
from run.evaluation.evaluate_checkpoint import evaluate_checkpoint
from terminal.command_line import read_command_line
from tests.slow import slow

PRESETS = {"tiny": "T5ForConditionalGeneration", "gptj_tiny": "GPTJForCausalLM"}
SMALL = ["--layers", "1"]
EXAMPLES = 90

# micro-batch, dp, tp: 2400 and 90 examples leave a last run that is not full in all but the first.
LAYOUTS = [(30, 1, 1), (64, 1, 1), (28, 2, 1), (70, 1, 2), (17, 2, 2), (64, 1, 4)]


def command(preset: str, folder: Path, *flags: str) -> list[str]:
    return ["--config", preset, "--device", "cpu", "--load", str(folder), *flags]


def config_of(arguments: list[str]) -> RunConfig:
    return read_command_line("", "inference", "tiny", arguments).config


def noisy(config: RunConfig) -> dict[str, np.ndarray]:
    """Random weights that all matter: norms are not 1, biases not 0."""
    rng = np.random.default_rng(0)
    weights = get_family(config).weight_map(config).init_weights(1)
    return {n: w + np.float32(0.1) * rng.standard_normal(w.shape, np.float32)
            for n, w in weights.items()}  # fmt: skip


def validated(arguments: list[str], out: Path, count: int | None) -> EvalResult:
    """The report on the first `count` examples."""
    few = ["--eval.samples", str(count or "null"), "--eval.metrics", "accuracy"]
    line = read_command_line("", "inference", "tiny", [*arguments, *few])
    return evaluate_checkpoint(line.config, line.preset, str(out))


def answered_by_transformers(folder: Path, preset: str, prompts: list[str]) -> list[str]:
    """Answers of the exported model, with its own tokenizer: nothing here is ours but the files."""
    model = getattr(transformers, PRESETS[preset]).from_pretrained(folder).eval()
    side = "right" if model.config.is_encoder_decoder else "left"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    # As many tokens as the longest answer has, with the end token.
    family = "t5" if model.config.is_encoder_decoder else "gptj"
    shape = load_family(family).sample_format
    config = FAMILIES[family].config.from_dict({"data": {"dataset": "sample"}})
    most = max(map(len, shape.encode_targets(config, list(NLI_LABELS), RunTokenizer(tokenizer))))
    answers: list[str] = []
    for start in range(0, len(prompts), 100):
        batch = tokenizer(prompts[start : start + 100], padding=True, return_tensors="pt")
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        with torch.no_grad():
            tokens = model.generate(**inputs, do_sample=False, max_new_tokens=most)
        if not model.config.is_encoder_decoder:
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return answers


def check(preset, run, flags, folder, layouts, count) -> EvalResult:
    """Export `run`; compare transformers' answers and those of all `layouts` with the first's."""
    arguments = command(preset, run, *flags)
    assert run_export.main([*arguments, "--save-hf", str(folder / "hf")]) == 0
    first, *others = (
        validated([*arguments, *layout_flags(*layout)], folder / "out", count) for layout in layouts
    )
    for other in others:
        assert other.predictions == first.predictions
    prompts = [answer.prompt for answer in first.predictions]
    theirs = answered_by_transformers(folder / "hf", preset, prompts)
    assert [answer.generated for answer in first.predictions] == theirs
    assert len(set(theirs)) > 2
    return first


def layout_flags(micro: int, dp: int, tp: int) -> list[str]:
    numbers = {"micro_batch_size": micro, "data_parallel": dp, "tensor_parallel": tp}
    return [f"--{name}={number}" for name, number in numbers.items()]


def test_weights_are_exported_in_the_type_that_they_have_or_that_a_flag_asks_for(tmp_path, capsys):
    weights = noisy(config_of(command("tiny", tmp_path, *SMALL)))
    with CheckpointStore(tmp_path / "run") as store:
        store.save(3, weights, {}, wait=True)

    def exported(*flags: str) -> dict[str, torch.Tensor]:
        folder = tmp_path / "-".join(["hf", *flags])
        arguments = command("tiny", tmp_path / "run", *SMALL, *flags)
        assert run_export.main([*arguments, "--save-hf", str(folder)]) == 0
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert (
            str(model.dtype)
            == f"torch.{read_json_object(folder / 'config.json').get_text('dtype')}"
        )
        return model.state_dict()

    whole, half = exported(), exported("--precision", "bfloat16")
    for name, weight in whole.items():
        assert weight.dtype == torch.float32
        assert torch.equal(half[name], weight.bfloat16())
    large = {name: np.full_like(weight, 1e5) for name, weight in weights.items()}
    with CheckpointStore(tmp_path / "large") as store:
        store.save(3, large, {}, wait=True)
    arguments = command("tiny", tmp_path / "large", *SMALL, "--precision", "float16")
    assert run_export.main([*arguments, "--save-hf", str(tmp_path / "none")]) == 2
    assert "values beyond 65504, the maximum of float16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "layouts"),
    [
        ("tiny", [LAYOUTS[0], LAYOUTS[4]]),
        ("gptj_tiny", [LAYOUTS[4]]),
        slow("gptj_tiny", [LAYOUTS[0], LAYOUTS[4]]),
    ],
    ids=lambda given: given if isinstance(given, str) else f"{len(given)}",
)
def test_the_exported_model_answers_as_ours_in_any_layout(preset, layouts, tmp_path):
    with CheckpointStore(tmp_path / "run") as store:
        weights = noisy(config_of(command(preset, tmp_path, *SMALL)))
        store.save(3, weights, {}, wait=True)
    check(preset, tmp_path / "run", SMALL, tmp_path, layouts, EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_the_trained_model_answers_alike_in_all_layouts(preset, tmp_path):
    train = ["--config", preset, "--device", "cpu", "--save", str(tmp_path / "run")]
    assert run_finetuning.main(train) == 0
    report = check(preset, tmp_path / "run", [], tmp_path, LAYOUTS, None)
    assert report.metrics["accuracy"] >= 0.85


def test_a_tokenizer_without_padding_and_a_vocabulary_without_room(tmp_path, capsys):
    """As GPT-2 has them: batches that transformers pads are answered, and as one by one."""
    letters = {letter: i for i, letter in enumerate(["<end>", *"abcdefghijklmnopqrstuvwx", "Ġ"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    base = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    base.save_pretrained(tmp_path / "tokenizer")
    assert "padding" not in capsys.readouterr().err
    sizes = ["--layers", "1", "--hidden_size", "32", "--heads", "2", "--vocab_size", "26"]
    sizes += ["--model.attention.rotary_dim", "4"]
    arguments = command("gptj_tiny", tmp_path / "run", *sizes)
    arguments += ["--tokenizer", str(tmp_path / "tokenizer")]
    with CheckpointStore(tmp_path / "run") as store:
        store.save(1, noisy(config_of(arguments)), {}, wait=True)
    assert run_export.main([*arguments, "--save-hf", str(tmp_path / "hf")]) == 0
    said = "the tokenizer has no padding token: '<end>', the end token, becomes it"
    assert capsys.readouterr().err.count(said) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", padding_side="left")
    assert len(tokenizer) == 26
    ids = {model.generation_config.eos_token_id, model.generation_config.pad_token_id}
    assert ids == {tokenizer.eos_token_id} == {tokenizer.pad_token_id}

    def answers(prompts: list[str]) -> list[str]:
        batch = tokenizer(prompts, padding=True, return_tensors="pt")
        found = model.generate(**batch, do_sample=False, max_new_tokens=6)
        new = found[:, batch["input_ids"].shape[1] :]
        return tokenizer.batch_decode(new, skip_special_tokens=True)

    prompts = ["abc", "a", "fed cab"]
    assert answers(prompts) == [answers([prompt])[0] for prompt in prompts]


def test_without_the_hubs_tokenizer_the_model_is_written(tmp_path, capsys):
    flags = ["--layers", "1", "--hidden_size", "8", "--d_ff", "8", "--heads", "2", "--d_kv", "4"]
    arguments = command("small", tmp_path / "run", *flags)
    with CheckpointStore(tmp_path / "run") as store:
        store.save(1, noisy(config_of(arguments)), {}, wait=True)
    assert run_export.main([*arguments, "--save-hf", str(tmp_path / "hf")]) == 0
    assert "warning: no tokenizer is written: tokenizer google/" in capsys.readouterr().err
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf")
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
