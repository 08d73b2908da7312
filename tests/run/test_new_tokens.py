"""Tokens beyond the rows of a published embedding, and rows for new ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
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
from checkpoints import load_checkpoint
from tests.slow import slow
from tests.small_runs import BATCH, RATE, random_model, train

SMALL = ("--layers", "1", "--hidden_size", "32", "--heads", "2")
QWEN = (
    *("--config", "qwen3_tiny", "--num_hidden_layers", "1", "--hidden_size", "32"),
    *("--num_attention_heads", "2", "--model.num_key_value_heads", "2"),
    *("--model.vocab_size", "644", "--model.max_position_embeddings", "256"),
    *("--tokenizer", "data/sample/chat_tokenizer"),
)
MODELS = {
    "untied": (*QWEN, "--model.tie_word_embeddings", "false"),
    "tied": QWEN,
    "gptj": ("--config", "gptj_tiny", "--layers", "1", "--hidden_size", "32", "--heads", "4"),
    "t5": ("--config", "tiny", *SMALL, "--d_ff", "32"),
}
ROWS = [{"prompt": f"what is {n}?", "completion": f"it is {n}"} for n in range(40)]
TRAINING = (*BATCH, *RATE, "--sequence_length", "32")

pytestmark = pytest.mark.usefixtures("few")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: random_model(folder / kind, *given) for kind, given in MODELS.items()}


def data(folder: Path, rows: Sequence[dict[str, str]] = ROWS) -> tuple[str, str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "--data.train", str(file)


def tokenizer_in(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def model_in(folder: Path, kind: str = "decoder") -> Any:
    cls = "AutoModelForSeq2SeqLM" if kind == "t5" else "AutoModelForCausalLM"
    return getattr(transformers, cls).from_pretrained(folder)


def longer(base: Path, folder: Path, token: str, **special: str) -> Path:
    """The model with a tokenizer of one token more than its embedding has rows."""
    shutil.copytree(base, folder)
    tokenizer = tokenizer_in(folder)
    tokenizer.add_tokens([f"<unused{n}>" for n in range(644 - len(tokenizer))])
    tokenizer.add_special_tokens(special) if special else tokenizer.add_tokens([token])
    assert tokenizer.convert_tokens_to_ids(token) == 644
    tokenizer.save_pretrained(folder)
    return folder


# ---- tokens without a row ------------------------------------------------------------------------
@pytest.mark.parametrize("special", [{}, slow({"pad_token": "<image>"})])
def test_a_model_trains_whose_tokenizer_has_a_token_more(
    special: dict[str, str], bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """As Gemma 3's has, and fine-tuned Llama 2's, where it is the padding."""
    base = longer(bases["untied"], tmp_path / "base", "<image>", **special)
    given = ("--load", str(base), *TRAINING, "--steps", "2")
    assert train(tmp_path / "run", *given, *data(tmp_path)) == 0
    said = capsys.readouterr().err
    assert ("no row for the padding token '<image>'" in said) == bool(special)
    assert load_checkpoint(tmp_path / "run").tensors["lm_head.weight"].shape[0] == 644
    assert run_generation.main(["--load", str(tmp_path / "run"), "what is 3?"]) == 0
    rows = [*ROWS[:7], {"prompt": "see <image> here", "completion": "yes"}]
    assert train(tmp_path / "other", *given, *data(tmp_path, rows)) == 2
    said = capsys.readouterr().err
    assert "rows.jsonl, line 8: 'see <image> here" in said
    assert "has the token '<image>', but none of the 644 rows of the model's embedding" in said
    assert "--model.add_tokens <image>" in said
    assert run_generation.main(["--load", str(tmp_path / "run"), "an <image>"]) == 2
    assert "has the token '<image>'" in capsys.readouterr().err


def test_a_row_for_the_token_that_lacks_one(bases: dict[str, Path], tmp_path: Path) -> None:
    base = longer(bases["untied"], tmp_path / "base", "<image>")
    given = ["--load", str(base), "--model.add_tokens", "<image>", "--save-hf", str(tmp_path / "o")]
    assert run_export.main(given) == 0
    assert model_in(tmp_path / "o").get_input_embeddings().weight.shape[0] == 645


def test_a_model_that_begins_at_random_names_the_rows_it_needs(tmp_path: Path, capsys: Any) -> None:
    few = (*MODELS["untied"], "--model.vocab_size", "200", *TRAINING, "--load", "random")
    assert train(tmp_path / "run", *few, *data(tmp_path)) == 2
    assert "model.vocab_size is 200: set it to" in capsys.readouterr().err


# ---- new tokens ----------------------------------------------------------------------------------
def tables(folder: Path, kind: str) -> list[np.ndarray]:
    """The weights with a row for each token, as transformers has them."""
    model = model_in(folder, kind)
    head = model.get_output_embeddings()
    found = [model.get_input_embeddings().weight, head.weight]
    found += [head.bias] if head.bias is not None else []
    return [array.detach().numpy() for array in found]


@pytest.mark.parametrize("kind", MODELS)
def test_new_rows_are_the_mean_of_the_others(
    kind: str, bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """In rows that the embedding has, without a token, and beyond them."""
    base, out = bases[kind], tmp_path / "out"
    old, known = tables(base, kind), len(tokenizer_in(base))
    rows = old[0].shape[0]
    count = rows - known + 2
    added = [f"<new_{n}>" for n in range(count)]
    given = ["--load", str(base), "--save-hf", str(out), "--model.add_tokens", *added]
    assert run_export.main(given) == 0
    said = capsys.readouterr().err
    assert said.count("begin with the mean of the others for <new_0>, <new_1>") == 1
    grows = f"rows {known}-{rows + 1} of the embedding, which grows from {rows} to {rows + 2}"
    assert grows in said
    for before, after in zip(old, tables(out, kind), strict=True):
        np.testing.assert_array_equal(after[:known], before[:known])
        mean = before[:known].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(after[known:], np.broadcast_to(mean, after[known:].shape), 1e-5)
        assert len(after) == rows + 2
    ids = tokenizer_in(out)(f"a{added[0]}b{added[-1]}").input_ids
    assert {known, rows + 1} < {*ids}


@pytest.mark.parametrize("kind", ["tied", slow("untied"), slow("gptj"), slow("t5")])
def test_new_tokens_are_trained_resumed_and_exported(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, run = bases[kind], tmp_path / "run"
    known = len(tokenizer_in(base))
    rows = [{"prompt": f"say <yes> {n}", "completion": f"{n} <yes> <no>"} for n in range(40)]
    given = ("--load", str(base), *TRAINING, *data(tmp_path, rows), "--learning_rate", "0.01")
    given += ("--model.add_tokens", "<yes>", "<no>")
    for steps in ("2", "4"):
        assert train(run, *given, "--steps", steps) == 0
    assert train(tmp_path / "once", *given, "--steps", "4") == 0
    found, expected = (load_checkpoint(each).tensors for each in (run, tmp_path / "once"))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert run_export.main(["--load", str(run), "--save-hf", str(tmp_path / "out")]) == 0
    for table in tables(tmp_path / "out", kind):
        assert (table[known] != table[known + 1]).any()
    assert tokenizer_in(tmp_path / "out").convert_tokens_to_ids("<no>") == known + 1
    assert run_generation.main(["--load", str(run), "say <yes> 3"]) == 0


def test_a_tokenizer_with_more_tokens_gives_new_rows(
    bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    base, tokenizer = bases["tied"], tokenizer_in(bases["tied"])
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>", "<|end_tool|>"]})
    tokenizer.save_pretrained(tmp_path / "more")
    given = ["--load", str(base), "--tokenizer", str(tmp_path / "more")]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 0
    assert f"rows {known}-{known + 1} of the embedding" in capsys.readouterr().err
    (table, _), (old, _) = tables(tmp_path / "out", "tied"), tables(base, "tied")
    np.testing.assert_array_equal(table[:known], old[:known])
    assert (table[known] == table[known + 1]).all()
    assert (table[known] != old[known]).any()


def test_a_token_that_is_there_already_is_told(
    bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    given = ["--load", str(bases["tied"]), "--model.add_tokens", "<|im_end|>", "<new>"]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "model.add_tokens: the tokenizer has <|im_end|> already" in said
    assert "row 640 of the embedding, begins with the mean of the others for <new>" in said


def test_rows_that_a_flag_asks_for_are_new(bases: dict[str, Path], tmp_path: Path) -> None:
    """Both ends of what was a circle: more rows for a tokenizer, and weights that do not fit."""
    given = ["--load", str(bases["tied"]), "--save-hf", str(tmp_path / "out")]
    assert run_export.main([*given, "--model.vocab_size", "652"]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert len(weights["model.embed_tokens.weight"]) == 652


def test_rows_are_padded_for_tensor_parallelism(bases: dict[str, Path], tmp_path: Path) -> None:
    known = len(tokenizer_in(bases["tied"]))
    added = [f"<{n}>" for n in range(645 - known)]
    given = ["--load", str(bases["tied"]), "--tensor_parallel", "2", "--model.add_tokens", *added]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "out")]) == 0
    assert len(tables(tmp_path / "out", "tied")[0]) == 646


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--model.vocab_size", "600"),
            "a model with vocab_size 644, but the configuration has 600",
        ),
        (("--model.new_rows", "5-3"), "new_rows is '5-3', but must be rows such as"),
        (("--model.new_rows", "1-2-3"), "new_rows is '1-2-3', but must be rows"),
        (("--model.new_rows", "644"), "new_rows is '644', but must be rows below model.vocab_size"),
    ],
)
def test_rows_that_cannot_be(
    flags: tuple[str, str], said: str, bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    given = ["--load", str(bases["tied"]), "--save-hf", str(tmp_path / "out"), *flags]
    assert run_export.main(given) == 2
    assert said in capsys.readouterr().err


# ---- adapters ------------------------------------------------------------------------------------
def logits(model: Any, known: int) -> np.ndarray:
    input_ids = torch.tensor([[3, known, 9, known + 1], [known, 5, 7, 8]])
    with torch.no_grad():
        return model.eval()(input_ids=input_ids).logits.numpy()


def with_adapter(base: Path, adapter: Path) -> Any:
    """The base in PEFT, with the rows that the adapter's card says."""
    model = model_in(base)
    rows = re.search(r"resize_token_embeddings\((\d+)\)", (adapter / "README.md").read_text())
    assert rows
    model.resize_token_embeddings(int(rows[1]))
    return peft.PeftModel.from_pretrained(model, adapter)


ENSURED = pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`")


@ENSURED
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("kind", ["tied", "untied", "gptj"])
def test_an_adapter_has_the_new_rows_that_its_base_lacks(
    kind: str, count: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    base, known = bases[kind], len(tokenizer_in(bases[kind]))
    added = [f"<{n}>" for n in range(count)]
    given = ["--load", str(base), "--adapter.rank", "2", "--model.add_tokens", *added]
    assert run_export.main([*given, "--save-hf", str(tmp_path / "adapter")]) == 0
    assert run_export.main([*given, "--merge", "--save-hf", str(tmp_path / "whole")]) == 0
    expected = logits(model_in(tmp_path / "whole"), known)
    found = logits(with_adapter(base, tmp_path / "adapter"), known)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    again = ["--load", str(base), "--adapter.load", str(tmp_path / "adapter"), "--merge"]
    assert run_export.main([*again, "--save-hf", str(tmp_path / "again")]) == 0
    np.testing.assert_array_equal(logits(model_in(tmp_path / "again"), known), expected)
    assert len(tokenizer_in(tmp_path / "again")) == known + count


@pytest.mark.parametrize("kind", [slow("tied"), "untied"])
def test_new_rows_are_trained_beside_adapters(
    kind: str, bases: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    base, run, known = bases[kind], tmp_path / "run", len(tokenizer_in(bases[kind]))
    rows = [{"prompt": f"say <yes> {n}", "completion": f"{n} <yes> <no>"} for n in range(40)]
    given = ("--load", str(base), *TRAINING, *data(tmp_path, rows), "--learning_rate", "0.02")
    given += ("--adapter.rank", "2", "--model.add_tokens", "<yes>", "<no>", "--steps", "2")
    saved = ("--adapter.modules_to_save", "embed_tokens", "lm_head")
    assert train(run, *given, *saved) == 0
    assert "rows in" not in capsys.readouterr().err
    assert run_export.main(["--load", str(run), "--save-hf", str(tmp_path / "adapter")]) == 0
    whole = ("--merge", "--save-hf", str(tmp_path / "whole"))
    assert run_export.main(["--load", str(run), *whole]) == 0
    expected = logits(model_in(tmp_path / "whole"), known)
    found = logits(with_adapter(base, tmp_path / "adapter"), known)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    (table, _) = tables(tmp_path / "whole", kind)
    assert (table[known] != table[known + 1]).any()
