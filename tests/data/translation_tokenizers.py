"""Tiny tokenizers of translation models, trained on a few sentences, in transformers' files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import NllbTokenizer

ENGLISH = (
    "Anna sees the red lamp.",
    "Ben takes the green chair.",
    "The house is big.",
    "She reads a book in the garden.",
    "We go home at night.",
    "Hello, how are you?",
)
GERMAN = (
    "Anna sieht die rote Lampe.",
    "Ben nimmt den grünen Stuhl.",
    "Das Haus ist groß.",
    "Sie liest ein Buch im Garten.",
    "Wir gehen nachts nach Hause.",
    "Hallo, wie geht es dir?",
)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
LANGUAGES = {
    "nllb": ("eng_Latn", "deu_Latn"),
    "m2m_100": ("en", "de"),
    "mbart50": ("en_XX", "de_DE"),
    "mbart": ("en_XX", "de_DE"),
    "marian": ("eng", "deu"),
    "marian_multilingual": ("eng", "deu"),
    "marian_two_vocabularies": ("eng", "deu"),
}
"""English and German, as each tokenizer names them."""


def write_tokenizer(name: str, folder: Path) -> None:
    """Write the files of one of the tokenizers in `LANGUAGES`."""
    folder.mkdir(parents=True)
    if name.startswith("marian"):
        _write_marian(name, folder)
        return
    model = _train([*ENGLISH, *GERMAN], 120, "bpe" if name in ("nllb", "m2m_100") else "unigram")
    pieces = [piece for piece in _pieces(model) if piece not in ("<unk>", "<s>", "</s>")]
    if name == "nllb":
        vocabulary = {piece: i for i, piece in enumerate((*SPECIAL, *pieces))}
        codes = ["eng_Latn", "deu_Latn", "fra_Latn"]
        tokenizer = NllbTokenizer(vocabulary, _merges(pieces), extra_special_tokens=codes)
        tokenizer.save_pretrained(folder)
        return
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    settings: dict[str, Any] = {"tokenizer_class": _CLASSES[name]}
    if name == "m2m_100":
        vocabulary = {piece: i for i, piece in enumerate((*SPECIAL, *pieces))}
        _write_json(folder / "vocab.json", vocabulary)
    _write_json(folder / "tokenizer_config.json", settings)


_CLASSES = {
    "m2m_100": "M2M100Tokenizer",
    "mbart50": "MBart50Tokenizer",
    "mbart": "MBartTokenizer",
}


def _write_marian(name: str, folder: Path) -> None:
    source, target = _train(ENGLISH, 70, "unigram"), _train(GERMAN, 70, "unigram")
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    codes = [">>deu<<", ">>fra<<"] if name == "marian_multilingual" else []
    settings: dict[str, Any] = {
        "tokenizer_class": "MarianTokenizer", "source_lang": "eng", "target_lang": "deu",
    }  # fmt: skip
    if name == "marian_two_vocabularies":
        _write_json(folder / "vocab.json", _marian_vocabulary(_pieces(source)))
        _write_json(folder / "target_vocab.json", _marian_vocabulary(_pieces(target)))
        settings["separate_vocabs"] = True
    else:
        both = _marian_vocabulary([*codes, *_pieces(source), *_pieces(target)])
        _write_json(folder / "vocab.json", both)
    _write_json(folder / "tokenizer_config.json", settings)


def _marian_vocabulary(pieces: list[str]) -> dict[str, int]:
    names = dict.fromkeys(["</s>", "<unk>", *pieces])
    names.pop("<s>", None)
    return {piece: i for i, piece in enumerate([*names, "<pad>"])}


def _train(sentences: tuple[str, ...] | list[str], size: int, kind: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences] * 3), model_writer=model, vocab_size=size,
        model_type=kind, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def _pieces(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.vocab_size())]


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """All merges of two pieces to a piece, in the order of the pieces."""
    known = {*pieces}
    return [
        (piece[:i], piece[i:])
        for piece in pieces
        for i in range(1, len(piece))
        if piece[:i] in known and piece[i:] in known
    ]


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), "utf-8")
