"""Translations by `run_generation.py`; transformers with its own tiny models is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

import run_generation
from data.tokenizer import Tokenizer
from huggingface.hub import load_tokenizer
from tests.data.translation_tokenizers import ENGLISH, GERMAN, LANGUAGES, write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

LENGTH = 8
MODELS = {
    "nllb": ("M2M100", 2),
    "m2m_100": ("M2M100", 2),
    "mbart50": ("MBart", 2),
    "mbart": ("MBart", 2),
    "marian": ("Marian", None),
    "marian_multilingual": ("Marian", None),
}
"""Class of each tokenizer's model, and its decoder's start token; None: padding."""


def write_model(name: str, folder: Path) -> Any:
    """Write a model with random weights, and its tokenizer; returns the model."""
    write_tokenizer(name, folder)
    tokenizer = Tokenizer(load_tokenizer(str(folder)))
    kind, start = MODELS[name]
    torch.manual_seed(3)
    pad = tokenizer.pad_token_id
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tokenizer.required_vocab_size, d_model=32, max_position_embeddings=64,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=pad, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=pad if start is None else start,
        forced_eos_token_id=None, encoder_layerdrop=0.0, decoder_layerdrop=0.0, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    suffix = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    model = getattr(transformers, kind + suffix)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter += 0.5 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


def translate_with_hf(
    name: str, model: Any, folder: Path, text: str, languages: tuple[str, str]
) -> np.ndarray:
    hf = AutoTokenizer.from_pretrained(folder)
    settings: dict[str, Any] = {}
    if name.startswith("marian"):
        text = f">>{languages[1]}<< {text}" if name == "marian_multilingual" else text
    else:
        hf.src_lang = languages[0]
        codes = getattr(hf, "lang_code_to_id", {})
        code = codes.get(languages[1], hf.convert_tokens_to_ids(languages[1]))
        name_of_token = "decoder_start_token_id" if name == "mbart" else "forced_bos_token_id"
        settings = {name_of_token: code}
    with torch.no_grad():
        tokens = model.generate(
            **hf(text, return_tensors="pt"), max_new_tokens=LENGTH, num_beams=1, do_sample=False,
            **settings,
        )  # fmt: skip
    return np.asarray(tokens[0, 1:])


@pytest.mark.parametrize(
    "name",
    [name if name == "nllb" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
@pytest.mark.parametrize(
    "mixed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["mixed", "one language"]
)
def test_translations_are_those_of_transformers(name: str, mixed: bool, tmp_path: Path) -> None:
    """Rows of both directions, or all of one, with the languages as flags."""
    if mixed and name in ("mbart", "marian", "marian_multilingual"):
        pytest.skip("its answers are all in one language")
    folder = tmp_path / "model"
    model = write_model(name, folder)
    english, german = LANGUAGES[name]
    rows = [
        {"source": text, "source_language": english, "target_language": german} for text in ENGLISH
    ]
    flags = ["--source_language", english, "--target_language", german]
    if mixed:
        rows += [
            {"source": text, "source_language": german, "target_language": english}
            for text in GERMAN
        ]
        flags = []
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    assert run_generation.main([
        "--load", str(folder), "--file", str(tmp_path / "rows.jsonl"), "--out", str(out),
        "--generation.max_tokens", str(LENGTH), "--device", "cpu", "--sequence_length", "40",
        *flags,
    ]) == 0  # fmt: skip
    tokenizer = Tokenizer(load_tokenizer(str(folder)))
    found = [json.loads(line)["generated"] for line in out.read_text("utf-8").splitlines()]
    tokens = [
        translate_with_hf(
            name, model, folder, row["source"], (row["source_language"], row["target_language"])
        )
        for row in rows
    ]
    expected = [text.strip() for text in tokenizer.decode(tokens)]
    assert found == expected
    assert len({*expected}) >= 2
