"""`run_validation.py` from the command line to eval.json, and what it says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

import run_validation
from checkpoints import CheckpointStore
from config.presets import load_config
from config.t5 import T5Config
from data.task import NLI_LABELS
from huggingface.model_folders import write_hf_directory
from run.evaluation.eval_result import MAX_EXAMPLES, NO_LABEL, EvalResult, Prediction
from tests.data.corpora import sample_examples, sample_tokenizer
from tests.modelling.t5.hf import hf_model
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

SMALL = ["--layers", "1", "--hidden_size", "32", "--d_ff", "32", "--heads", "2", "--d_kv", "8"]
ACCURACY = ["--eval.metrics", "accuracy"]
SMALL_CONFIG = load_config(
    T5Config,
    "inference",
    "tiny",
    {"model": {"layers": 1, "hidden_size": 32, "d_ff": 32, "attention": {"heads": 2, "d_kv": 8}}},
)


def evaluate_checkpoint(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the script."""
    code = run_validation.main(
        ["--config", "tiny", *SMALL, "--device", "cpu", *ACCURACY, *arguments]
    )
    out, err = capsys.readouterr()
    return code, out, err


def says_neutral() -> dict[str, np.ndarray]:
    """Weights of a model that answers "neutral" whatever it is asked.

    Nothing is added to the residual stream, so that a position's output is the embedding of the
    token read there; the head knows for each token of the answer which one comes next.
    """
    weights = dict(base_weight_map(SMALL_CONFIG).init_weights(0))
    for name in weights:
        if name.endswith(("o.weight", "wo.weight")):
            weights[name] = np.zeros_like(weights[name])
    answer = sample_tokenizer()("neutral")["input_ids"]
    head = np.zeros_like(weights["lm_head.weight"])
    for token, following in zip([0, *answer], answer, strict=False):
        head[following] = weights["shared.weight"][token]
    return weights | {"lm_head.weight": head}


# ---- right --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layout",
    [
        slow(["--micro_batch_size", "700"]),  # 2400 examples: the last batch is not full
        ["--micro_batch_size", "70", "--data_parallel", "2", "--tensor_parallel", "2"],
    ],
    ids=["one device", "2 x 2 devices"],
)
def test_the_whole_set_is_counted(tmp_path, capsys, layout):
    with CheckpointStore(tmp_path / "run") as store:
        store.save(7, says_neutral(), {}, wait=True)
    code, out, _ = evaluate_checkpoint(capsys, "--load", str(tmp_path / "run"), *layout)
    examples = sample_examples("validation")
    neutral = sum(example.target == "neutral" for example in examples)
    assert code == 0
    assert out.splitlines()[-1] == (
        f"accuracy: {neutral / len(examples):.4f} ({neutral}/{len(examples)})"
    )
    report = json.loads((tmp_path / "run" / "eval.json").read_text(encoding="utf-8"))
    assert report["step"] == 7
    assert report["total"] == len(examples)
    for row in report["confusion"].values():
        assert row == dict.fromkeys(row, 0) | {"neutral": len(examples) // len(NLI_LABELS)}
    assert {error["generated"] for error in report["errors"]} == {"neutral"}


def test_answers_are_hugging_faces(tmp_path, capsys):
    """From a Hugging Face folder, with prompts, lengths and decoding made independently here."""
    hf = hf_model(SMALL_CONFIG)
    folder, out = tmp_path / "model", tmp_path / "out"
    write_hf_directory(folder, {n: p.detach().numpy() for n, p in hf.named_parameters()}, {})
    code, _, _ = evaluate_checkpoint(capsys, "--load", str(folder), "--out", str(out))
    assert code == 0
    errors = json.loads((out / "eval.json").read_text(encoding="utf-8"))["errors"]
    assert len(errors) == MAX_EXAMPLES  # random weights answer nonsense
    examples = sample_examples("validation")
    known = {example.prompt: example.target for example in examples}
    assert [known[error["prompt"]] for error in errors] == [e["expected"] for e in errors]
    generated = _generated_by(hf, [error["prompt"] for error in errors])
    assert [error["generated"] for error in errors] == generated
    assert len(set(generated)) > 1


def _generated_by(hf: T5ForConditionalGeneration, prompts: list[str]) -> list[str]:
    hf.config.tie_word_embeddings = False  # see tests/modelling/t5/hf.py
    tokenizer = sample_tokenizer()
    encoded = tokenizer(prompts, padding=True, return_tensors="pt")
    longest = max(len(tokenizer(word)["input_ids"]) for word in NLI_LABELS)
    with torch.no_grad():
        tokens = hf.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            do_sample=False,
            max_new_tokens=longest,
        )
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def test_prompts_that_are_cut_are_counted_where_only_the_loss_is_wanted(tmp_path, capsys):
    with CheckpointStore(tmp_path / "run") as store:
        store.save(7, dict(base_weight_map(SMALL_CONFIG).init_weights(0)), {}, wait=True)
    few = ["--eval.samples", "40", "--micro_batch_size", "40", "--sequence_length", "16"]
    loss = ["--eval.metrics", "loss"]
    code, _, err = evaluate_checkpoint(capsys, "--load", str(tmp_path / "run"), *few, *loss)
    assert code == 0
    prompts = [example.prompt for example in sample_examples("validation")[:40]]
    cut = sum(len(ids) > 16 for ids in sample_tokenizer()(prompts)["input_ids"])
    assert cut > 0
    assert f"warning: {cut} of 40 prompts of the validation split are cut\n" in err
    report = json.loads((tmp_path / "run" / "eval.json").read_text(encoding="utf-8"))
    assert report["prompts_cut"] == cut


def test_report_counts_and_examples(tmp_path):
    answers = [
        Prediction("a", " yes", "yes"),
        Prediction("b", "no", "yes"),
        Prediction("c", "what", "no"),
        *[Prediction(str(i), "yes", "no") for i in range(MAX_EXAMPLES + 5)],
    ]
    total = len(answers)
    metrics = {"accuracy": 1 / total, "loss": 2.5e-5}
    report = EvalResult(metrics, answers, ("yes", "no"), {"step": 3})
    assert report.summary() == f"accuracy: {1 / total:.4f} (1/{total})\nloss: 2.5e-05"
    report.write(tmp_path / "new" / "eval.json")
    data = json.loads((tmp_path / "new" / "eval.json").read_text(encoding="utf-8"))
    assert data["confusion"] == {
        "yes": {"yes": 1, "no": 1, NO_LABEL: 0},
        "no": {"yes": MAX_EXAMPLES + 5, "no": 0, NO_LABEL: 1},
    }
    assert data["errors"][:2] == [
        {"prompt": "b", "expected": "yes", "generated": "no"},
        {"prompt": "c", "expected": "no", "generated": "what"},
    ]
    assert len(data["errors"]) == MAX_EXAMPLES
    assert (data["step"], data["loss"]) == (3, 2.5e-5)


# ---- a person's mistakes ------------------------------------------------------------------------
def assert_one_sentence(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith("error: ")
    # What is damaged is found when it is read, after the program is ready.
    progress = ("running on ", "compiling ", "ready after ", "the weights are those of ",
                "columns that are not read: ")  # fmt: skip
    assert all(line.startswith(progress) for line in before)
    for word in words:
        assert word in err


def test_without_weights(capsys):
    assert_one_sentence(evaluate_checkpoint(capsys), "--load")


def test_nothing_there(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        assert_one_sentence(evaluate_checkpoint(capsys, "--load", str(folder)), str(folder))


def test_damaged_checkpoint(tmp_path, capsys):
    with CheckpointStore(tmp_path) as store:
        store.save(1, says_neutral(), {}, wait=True)
    (file,) = tmp_path.glob("*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert_one_sentence(evaluate_checkpoint(capsys, "--load", str(tmp_path)), "damaged", "step 1")


def test_weights_of_another_model(tmp_path, capsys):
    write_hf_directory(tmp_path, says_neutral(), {})
    assert_one_sentence(
        evaluate_checkpoint(capsys, "--load", str(tmp_path), "--layers", "2"),
        "another kind or size",
    )


def test_no_room_for_the_answer(tmp_path, capsys):
    write_hf_directory(tmp_path, says_neutral(), {})
    result = evaluate_checkpoint(capsys, "--load", str(tmp_path), "--decoder_sequence_length", "1")
    assert_one_sentence(result, "decoder_sequence_length")


def test_report_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot write .*eval.json"):
        EvalResult({"accuracy": 1.0}, [Prediction("a", "yes", "yes")], ("yes",), {}).write(
            tmp_path / "file" / "eval.json"
        )
