"""Tokenizers as they are published, and folders that lack the file of the vocabulary."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from config.errors import UserError
from data.tokenizer import Tokenizer
from huggingface.hub import load_tokenizer
from tests.huggingface.published import facts, small

T5 = {
    "tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>",
    "pad_token": "<pad>", "additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"],
}  # fmt: skip
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WITHOUT = {
    # checkpoint, tokenizer_config.json, and the file that should be there
    "mT5": ("google/mt5-small", T5, "spiece.model"),
    "T5 v1.1": ("google/t5-v1_1-base", T5, "spiece.model"),
    "T5, without any file": ("google-t5/t5-base", None, "spiece.model"),
    "Llama 2": (
        "meta-llama/Llama-2-7b-hf", {"tokenizer_class": "LlamaTokenizer"} | ENDS, "tokenizer.model"
    ),
    "GPT-J": (
        "EleutherAI/gpt-j-6b", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<e>"},
        "vocab.json or merges.txt",
    ),
    "Qwen 3": (
        "Qwen/Qwen3-0.6B", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"},
        "vocab.json or merges.txt",
    ),
    "Gemma": ("google/gemma-2-2b-it", {"tokenizer_class": "GemmaTokenizer"}, "tokenizer.json"),
    "CodeT5": (
        "Salesforce/codet5-base (fine-tuned)", {"tokenizer_class": "RobertaTokenizer"}, "vocab.json"
    ),
}  # fmt: skip


def write_json(folder: Path, **files: Any) -> None:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_tokenizer_without_its_vocabulary_is_refused(kind: str, tmp_path: Path) -> None:
    """Every text would be <unk>, or no token at all, and training would end well."""
    name, settings, file = WITHOUT[kind]
    write_json(tmp_path, config=small(facts()[name]["config"]))
    write_json(tmp_path, added_tokens={"<|more|>": 400}, special_tokens_map={"eos_token": "</s>"})
    if settings is not None:
        write_json(tmp_path, tokenizer_config=settings)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path))
    said = str(caught.value)
    assert said.startswith(f"the tokenizer in {tmp_path} has no vocabulary")
    assert file in said
    assert "--tokenizer" in said


@cache
def pieces() -> bytes:
    """A spiece.model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog ran in the park"] * 9),
        model_writer=model, vocab_size=21, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


OBJECTS = [{"content": f"<extra_id_{i}>", "lstrip": False, "rstrip": True} for i in range(2)]


@pytest.mark.parametrize(
    "settings",
    [
        T5,
        {},
        T5 | {"additional_special_tokens": OBJECTS},
        T5 | {"additional_special_tokens": ["<extra_id_0>", OBJECTS[1]]},
        T5 | {"additional_special_tokens": [{"__type": "AddedToken"} | one for one in OBJECTS]},
    ],
    ids=["texts", "none", "objects", "both", "typed objects"],
)
def test_a_vocabulary_of_sentencepiece_alone_is_read(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """As those of mT5 and T5 v1.1; transformers does not read objects without a type."""
    (tmp_path / "spiece.model").write_bytes(pieces())
    write_json(tmp_path, config=small(facts()["google/mt5-small"]["config"]))
    if settings:
        write_json(tmp_path, tokenizer_config=settings, special_tokens_map=settings)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer("the cat <extra_id_1>")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.convert_tokens_to_ids("<extra_id_1>") in ids
    assert ids[-1] == tokenizer.eos_token_id


def test_byt5_has_a_tokenizer_without_any_vocabulary(tmp_path: Path) -> None:
    """Its tokens are bytes, some of which are parts of a letter."""
    write_json(tmp_path, config=small(facts()["google/byt5-small"]["config"]))
    write_json(tmp_path, tokenizer_config={"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125})
    tokenizer = Tokenizer(load_tokenizer(str(tmp_path)), vocab_size=384)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.required_vocab_size) == (
        0,
        1,
        384,
    )
    (ids,) = tokenizer.encode(["größer 大"])
    assert ids.tolist() == [*(byte + 3 for byte in "größer 大".encode()), 1]
    assert tokenizer.decode([ids]) == ["größer 大"]
    assert not any(tokenizer.find_lost_characters(["größer 大\n"]))
    printed = tokenizer.token_bytes(384)
    assert b"".join(printed[token] for token in ids[:-1]) == "größer 大".encode()
