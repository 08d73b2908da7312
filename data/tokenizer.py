"""The tokenizer of a run: encoding with loss masks, decoding, and special tokens."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from config.errors import UserError
from data.document_chunks import DocumentChunk
from data.examples import TextSpan
from data.examples import TokenizedText as TokenizedText
from files.atomic_writing import write_folder, write_json
from files.formatting import format_name, format_value
from files.run_folder import RunFolder
from huggingface.generation_config import GENERATION_CONFIG
from huggingface.tokenizer_limits import catch_panics
from terminal.screen import say

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
CHUNK_TEXTS = 4096
"""Number of texts in a call of the tokenizer, which bounds memory."""
MAX_WORD_CONTEXT = 40
"""Characters of a word checked on each side of a character."""
NO_VOCAB_LIMIT = 2**63 - 1
"""Vocabulary size where no model is known."""

DEFAULT_PAD_TOKEN = "<|extratoken_1|>"
"""Padding token added to a vocabulary without one; GPT-J's name."""


class MissingRowError(UserError, ValueError):
    """A token id beyond the rows of the model's embedding.

    Attributes:
        token: as the tokenizer writes it.
    """

    def __init__(self, text: str, token: str, rows: int) -> None:
        self.token = token
        start = max(text.find(token) - 20, 0)
        part = format_value(text[start : start + 40 + len(token)])
        super().__init__(
            f"{part} has the token {format_value(token)}, but none of the {rows} rows of the "
            "model's embedding is for it: leave such rows of data out, or give "
            f"--model.add_tokens {format_name(token)}, which trains a new one"
        )


class Tokenizer:
    """A transformers tokenizer with known end and padding tokens.

    Attributes:
        base: the tokenizer of transformers.
        end, pad: the tokens that end an answer and that fill a row after it. They may be the same
            one.
        chat: whether texts have their special tokens in them, as chat templates write them, so that
            none are added.
    """

    def __init__(
        self,
        base: PreTrainedTokenizerFast,
        vocab_size: int | None = None,
        chat: bool = False,
        end: int | None = None,
    ) -> None:
        """
        Args:
            vocab_size: rows of the model's embedding. Where the tokenizer has no padding token, or
                one without a row, it gets one in a row that it does not use yet, else the end
                token.
            end: what ends an answer, if that is not the tokenizer's end token.

        Raises:
            ValueError: it has no end token, or one without a row.
        """
        if base.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token: give one whose tokenizer_config.json names it"
            )
        limit = NO_VOCAB_LIMIT if vocab_size is None else vocab_size
        if base.pad_token_id is None or base.pad_token_id >= limit:
            _set_pad_token(base, vocab_size or 0)
        self.base, self.chat, self._vocab_size = base, chat, limit
        self.end = int(base.eos_token_id) if end is None else end
        self.pad = int(base.pad_token_id)
        self._lacks_rows = self.rows > limit
        if self.end >= limit:
            raise ValueError(
                f"the end token {format_value(base.convert_ids_to_tokens(self.end))} is number "
                f"{self.end}, but the model's embedding has {vocab_size} rows: give the model's "
                "own --tokenizer, or --model.add_tokens with that token"
            )

    @property
    def rows(self) -> int:
        """Number of embedding rows that all tokens need."""
        return _required_vocab_size(self.base)

    @property
    def state(self) -> list[object]:
        """Everything that determines the token ids, as JSON values."""
        backend = getattr(self.base, "backend_tokenizer", None)
        vocabulary = sorted(self.base.get_vocab().items()) if backend is None else backend.to_str()
        return [vocabulary, self.end, self.pad]

    def ids(self, texts: Iterable[str], *, special: bool = True) -> Iterator[np.ndarray]:
        """Encode texts: token ids, int32 [n] each.

        Args:
            special: with the tokens that the tokenizer puts around a text, such as T5's end token.
        """
        special = special and not self.chat
        for chunk in split_chunks(texts):
            with catch_panics():
                encoded = self.base(chunk, add_special_tokens=special, verbose=False)["input_ids"]
            self._check_rows(chunk, encoded)
            yield from (np.asarray(ids, np.int32) for ids in encoded)

    def encode_with_loss_mask(self, texts: Iterable[Sequence[TextSpan]]) -> Iterator[TokenizedText]:
        """Encode texts given as spans, with the end token and a loss mask.

        A text is tokenised as a whole. A token is learned if any of its characters is; the end
        token, as the last span is. Those of chats end as their template says.
        """
        for chunk in split_chunks(texts):
            whole = ["".join(span.text for span in spans) for spans in chunk]
            for spans, encoding in zip(chunk, self.encode_fast(whole, not self.chat), strict=True):
                ids = np.asarray(encoding.ids, np.int32)
                learned = _loss_mask(spans, encoding)
                if not self.chat:
                    if not len(ids) or ids[-1] != self.end:
                        ids, learned = np.append(ids, np.int32(self.end)), np.append(learned, False)
                    learned[-1] = spans[-1].in_loss
                yield TokenizedText(ids, learned)

    def encode_doc_chunks(
        self, texts: Iterable[tuple[str, DocumentChunk]]
    ) -> Iterator[TokenizedText]:
        """Encode document chunks, all in the loss; concatenated, they are the document's tokens and
        the end token."""
        for chunk in split_chunks(texts):
            whole = [part.context + text for text, part in chunk]
            for (text, part), found in zip(chunk, self.encode_fast(whole, False), strict=True):
                first = first_token_from(found, len(part.context))
                if first is None:  # one token has characters of both
                    (found,), first = self.encode_fast([text], False), 0
                ends = [] if part.context else self.affix_ids[0]
                ids = [*ends, *found.ids[first:], *([self.end] if part.is_last else [])]
                yield TokenizedText(np.asarray(ids, np.int32), np.ones(len(ids), bool))

    @cached_property
    def affix_ids(self) -> tuple[list[int], list[int]]:
        """Token ids that the tokenizer adds before and after a text."""
        whole = self.base("a", add_special_tokens=not self.chat, return_special_tokens_mask=True)
        ids, mask = list(whole["input_ids"]), whole["special_tokens_mask"]
        start = next((i for i, special in enumerate(mask) if not special), 0)
        text = self.base("a", add_special_tokens=False)["input_ids"]
        return ids[:start], ids[start + len(text) :]

    def with_eos(self, ids: np.ndarray) -> np.ndarray:
        """Append the end token unless it is there, int32 [n]."""
        if len(ids) and ids[-1] == self.end:
            return ids
        return np.append(ids, np.int32(self.end))

    def encode_fast(self, texts: Sequence[str], special: bool) -> Sequence[Encoding]:
        """Encode with the tokenizers library, which also gives character offsets."""
        with catch_panics():
            found = self.base(
                list(texts), add_special_tokens=special, return_attention_mask=False,
                return_token_type_ids=False, verbose=False,
            ).encodings  # fmt: skip
        assert found is not None, "the tokenizer is none of the tokenizers library"
        self._check_rows(texts, (encoding.ids for encoding in found))
        return list(found)

    def _check_rows(self, texts: Sequence[str], tokens: Iterable[Sequence[int]]) -> None:
        """Raise MissingRowError for a token without an embedding row."""
        if not self._lacks_rows:
            return
        for text, ids in zip(texts, tokens, strict=True):
            above = next((token for token in ids if token >= self._vocab_size), None)
            if above is not None:
                raise MissingRowError(
                    text, self.base.convert_ids_to_tokens(above), self._vocab_size
                )

    def token_bytes(self, rows: int) -> list[bytes]:
        """UTF-8 bytes of each token, which can be a part of a character.

        Args:
            rows: of the model's embedding; those without a token print nothing.
        """
        ids = self.base("abc", add_special_tokens=False)["input_ids"]
        before = self.base.convert_ids_to_tokens(ids)
        start = len(self.base.convert_tokens_to_string(before))
        of_bytes = _byte_alphabet(self.base)
        pieces = [b""] * rows
        for token, number in self.base.get_vocab().items():
            if number >= rows:
                continue
            if token and all(letter in of_bytes for letter in token):
                pieces[number] = bytes(of_bytes[letter] for letter in token)
            elif byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
                pieces[number] = bytes.fromhex(byte[1])
            else:
                text = self.base.convert_tokens_to_string([*before, token])
                pieces[number] = text[start:].encode()
        return pieces

    def lost_characters(self, texts: Iterable[str]) -> tuple[list[str], list[str]]:
        """Characters that encoding loses: unknown ones, and ones decoded in another form, such as
        lower case."""
        texts = list(texts)
        characters = sorted(set[str]().union(*texts) - {" "})
        alone, amid = (
            self._read_back(characters),
            self._read_back(map(_between_letters, characters)),
        )
        unknown, changed = list[str](), list[str]()
        for c, *back in zip(characters, alone, amid, strict=True):
            pairs = [(c, back[0]), (_between_letters(c), back[1])]
            if any(_survives(pair, c) for pair in pairs):
                continue
            # A letter that is unknown alone may be a part of known words.
            word = _word_around(c, next(text for text in texts if c in text))
            pairs.append((word, self._read_back([word])[0]))
            if not _survives(pairs[-1], c):
                is_changed = any(
                    _survives(
                        (_fold_case_and_accents(a), _fold_case_and_accents(b)),
                        _fold_case_and_accents(c),
                    )
                    for a, b in pairs
                )
                (changed if is_changed else unknown).append(c)
        return unknown, changed

    @cached_property
    def keeps_repeated_spaces(self) -> bool:
        """True if repeated spaces survive encoding and decoding."""
        (text,) = self._read_back([_between_letters(REPEATED_SPACES)])
        return REPEATED_SPACES in text

    def _read_back(self, texts: Iterable[str]) -> list[str]:
        """Encode and decode texts, without unknown tokens."""
        unknown = self.base.unk_token_id
        rows = [[token for token in ids.tolist() if token != unknown] for ids in self.ids(texts)]
        return self.texts(rows) if rows else []  # the tokenizer decodes no empty list

    def texts(self, tokens: np.ndarray | Sequence[Sequence[int]]) -> list[str]:
        """Decode rows of token ids, without special tokens."""
        decoded: list[str] = self.base.batch_decode(tokens, skip_special_tokens=True)
        return decoded


REPEATED_SPACES = "  "
"""Stands for repeated spaces in a set of characters."""


def collect_characters(texts: Iterable[str]) -> set[str]:
    """Set of characters in texts, and `REPEATED_SPACES` if they occur."""
    found = set[str]()
    for text in texts:
        found.update(text)
        if REPEATED_SPACES in text:
            found.add(REPEATED_SPACES)
    return found


def save_tokenizer(
    tokenizer: Tokenizer, run: RunFolder, settings: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Save a tokenizer in the run folder, unless there is one.

    Args:
        settings: of the model's generation_config.json, which lies with its tokenizer.

    Raises:
        WriteError: it cannot be written.
    """

    def fill(draft: Path) -> None:
        tokenizer.base.save_pretrained(draft)
        if settings:
            write_json(draft / GENERATION_CONFIG, settings)

    if not run.tokenizer.exists():
        write_folder("the tokenizer", run.tokenizer, fill)


def find_saved_tokenizer(run: RunFolder) -> Path | None:
    """Folder of the tokenizer saved with a run; None without one."""
    path = run.tokenizer.absolute()
    return path if path.is_dir() else None


def warn_truncated(answers: np.ndarray, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
    """Print how many answers, int32 [n, length], reached the token limit.

    An answer is whole if it has an end token, or ends with one of the stop texts.
    """
    whole = (answers == tokenizer.end).any(axis=1)
    if stops:
        whole |= answers[:, -1] == tokenizer.pad  # something ended it before the limit
        last = tokenizer.texts(answers[~whole])
        whole[~whole] = [any(stop in text for stop in stops) for text in last]
    cut = int(np.count_nonzero(~whole))
    if cut:
        say(
            f"{cut} of {len(answers)} answers were cut at {answers.shape[1]} tokens: "
            "--generation.max_tokens sets the limit"
        )


def _between_letters(character: str) -> str:
    """The character between two other letters."""
    other = "b" if _fold_case_and_accents(character) == "a" else "a"
    return f"{other}{character}{other}"


def _word_around(character: str, text: str) -> str:
    """The word of a text that contains the character, cut if it is long."""
    place = text.index(character)
    first, last = text.rfind(" ", 0, place) + 1, text.find(" ", place)
    last = len(text) if last < 0 else last
    return text[max(first, place - MAX_WORD_CONTEXT) : min(last, place + MAX_WORD_CONTEXT)]


def _fold_case_and_accents(text: str) -> str:
    """The text in lower case without accents."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in plain if not unicodedata.combining(c))


def _survives(pair: tuple[str, str], character: str) -> bool:
    """True if all occurrences of a character survive encoding and decoding."""
    text, back, one = (unicodedata.normalize("NFKC", s) for s in (*pair, character))
    return bool(one) and back.count(one) >= max(text.count(one), 1)


def _loss_mask(spans: Sequence[TextSpan], encoding: Encoding) -> np.ndarray:
    """Mask of the tokens that overlap spans in the loss, bool [n]."""
    learned, start = np.zeros(len(encoding.ids), bool), 0
    for span in spans:
        end = start + len(span.text)
        if span.in_loss:
            learned[slice(*_tokens_within(encoding, start, end))] = True
        start = end
    return learned


def _tokens_within(encoding: Encoding, start: int, end: int) -> tuple[int, int]:
    """Token range [first, end) that covers the characters from `start` up to `end`.

    A token without characters counts as the one that follows it; special tokens that are not in the
    text, as none. Asking for single ones is faster than reading the places of all.
    """
    found = (encoding.char_to_token(at) for at in range(start, end))
    first = next((token for token in found if token is not None), None)
    if first is None:
        return 0, 0
    last = first

    def begins(token: int) -> int:
        """First character of a token; -1 if it has none in the text."""
        if not 0 <= token < len(encoding.ids):
            return -1
        place = encoding.token_to_chars(token)
        return -1 if place is None or place[1] == 0 else int(place[0])

    while begins(first - 1) >= start:
        first -= 1
    found = (encoding.char_to_token(at) for at in range(end - 1, start - 1, -1))
    last = max(last, next((token for token in found if token is not None), last))
    while 0 <= begins(last + 1) < end:
        last += 1
    return first, last + 1


def first_token_from(encoding: Encoding, start: int) -> int | None:
    """Index of the first token that starts at a character or later; None if a token straddles
    it."""
    if start == 0:
        return 0
    last = _tokens_within(encoding, 0, start)[1]
    place = encoding.token_to_chars(last - 1) if last else None
    return None if place is not None and place[1] > start else last


def _byte_alphabet(base: PreTrainedTokenizerFast) -> dict[str, int]:
    """Byte of each letter in byte-level tokens, as in GPT-2 and ByT5; else empty."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if not base.vocab_files_names:
        return {chr(byte): byte for byte in range(256)}
    backend = getattr(base, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    if '"ByteLevel"' not in json.dumps(decoder):
        return {}
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def add_tokens(base: PreTrainedTokenizerFast, names: Iterable[str]) -> None:
    """Add missing tokens to a tokenizer."""
    known = base.get_vocab()
    base.add_tokens([name for name in names if name not in known])


def _set_pad_token(base: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Set a padding token that has an embedding row: a new one, or the end token."""
    lacks = "the tokenizer has no padding token"
    if base.pad_token_id is not None:
        lacks = (
            f"the model's embedding has no row for the padding token {format_value(base.pad_token)}"
        )
    known = base.get_vocab().get(DEFAULT_PAD_TOKEN)
    there = (
        _required_vocab_size(base) < vocab_size
        if known is None
        else known < (vocab_size or NO_VOCAB_LIMIT)
    )
    base.add_special_tokens({"pad_token": DEFAULT_PAD_TOKEN if there else base.eos_token})
    own = "a token of its own" if there else "the end token"
    say(f"{lacks}: {format_value(base.pad_token)}, {own}, becomes it")


def _required_vocab_size(base: PreTrainedTokenizerFast) -> int:
    return max(len(base), *(i + 1 for i in base.get_vocab().values()))


def split_chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """Split items into lists of up to `CHUNK_TEXTS`."""
    left = iter(items)
    while chunk := list(islice(left, CHUNK_TEXTS)):
        yield chunk
