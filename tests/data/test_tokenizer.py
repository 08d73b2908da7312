"""Characters that a tokenizer loses or changes, judged by what it does to the texts themselves."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.tokenizer import Tokenizer

WORDS = ("the", "quick", "fox")


def made(backend: Backend, special: bool = True) -> Tokenizer:
    """A tokenizer of transformers; `special`: it leaves [UNK] out of what it decodes."""
    unk = {"unk_token": "[UNK]"} if special else {}
    base = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="[SEP]", pad_token="[PAD]", **unk
    )
    return Tokenizer(base)


def of_words(special: bool = True) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[SEP]", *WORDS, "."))}
    backend = Backend(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return made(backend, special)


def of_pieces(lower: bool, special: bool = True) -> Tokenizer:
    """As BERT's: pieces of words, in small letters."""
    letters = "abcdefgh"
    pieces = [*letters, *(f"##{letter}" for letter in letters[:4]), "."]
    vocabulary = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[SEP]", *pieces))}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return made(backend, special)


@pytest.mark.parametrize("special", [True, False])
def test_letters_of_known_words_are_known(special: bool) -> None:
    """Alone they are [UNK]."""
    assert of_words(special).find_lost_characters(["the quick fox.", "the fox"]) == ([], [])
    assert of_words(special).find_lost_characters(["the quick fox ☃", "the slow fox"])[0] == [
        "l",
        "s",
        "w",
        "☃",
    ]


@pytest.mark.parametrize("special", [True, False])
def test_letters_that_are_made_small_are_not_lost(special: bool) -> None:
    unknown, changed = of_pieces(lower=True, special=special).find_lost_characters(
        ["Bad Café", "DEaf."]
    )
    assert (unknown, changed) == ([], ["B", "C", "D", "E", "é"])


def test_an_unknown_capital_is_lost_where_letters_keep_their_form() -> None:
    assert of_pieces(lower=False).find_lost_characters(["Bad cab"]) == (["B"], [])


def test_a_letter_that_begins_a_word_alone_is_known_only_there() -> None:
    """`h` has no piece within a word: the text has it at the beginning of one."""
    assert of_pieces(lower=True).find_lost_characters(["had", "h"]) == ([], [])
    assert of_pieces(lower=True).find_lost_characters(["bahab"]) == ([], [])  # alone it is known


@pytest.mark.parametrize("texts", [[], [""], [" "], ["   ", ""]])
def test_texts_without_characters(texts: list[str]) -> None:
    assert of_words().find_lost_characters(texts) == ([], [])
