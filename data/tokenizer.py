"""The tokenizer of a run: encoding with loss masks, decoding, and special tokens."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from config.errors import UserError
from data.examples import Languages, TextSpan
from data.examples import TokenizedText as TokenizedText
from files.atomic_writing import write_folder_atomically, write_json
from files.formatting import format_name, format_value
from files.run_folder import RunFolder
from huggingface.tokenizer_checks import wrap_rust_panics
from terminal.screen import say

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

    from data.document_chunks import DocumentChunk
    from data.language_codes import LanguageCodes

T = TypeVar("T")
CHUNK_TEXTS = 4096
"""Number of texts in a call of the tokenizer, which bounds memory."""
MAX_WORD_CONTEXT = 40
"""Characters of a word checked on each side of a character."""
NO_VOCAB_LIMIT = 2**63 - 1
"""Vocabulary size where no model is known."""

DEFAULT_PAD_TOKEN = "<|extratoken_1|>"
"""Padding token added to a vocabulary without one; GPT-J's name."""


class MissingEmbeddingRowError(UserError, ValueError):
    """Raised for a token id that has no row in the model's embedding.

    Attributes:
        token: as the tokenizer writes it.
    """

    def __init__(self, text: str, token: str, rows: int) -> None:
        self.token = token
        start = max(text.find(token) - 20, 0)
        excerpt = format_value(text[start : start + 40 + len(token)])
        super().__init__(
            f"{excerpt} has the token {format_value(token)}, but none of the {rows} rows of the "
            "model's embedding is for it: leave such rows of data out, or give "
            f"--model.add_tokens {format_name(token)}, which trains a new one"
        )


class Tokenizer:
    """A transformers tokenizer that has an end token and a padding token.

    Attributes:
        hf_tokenizer: the tokenizer of transformers.
        eos_token_id, pad_token_id: the tokens that end an answer and that fill a row after it. They
            may be the same one.
        chat: whether texts have their special tokens in them, as chat templates write them, so that
            none are added.
        language_codes: of a tokenizer that marks texts with their language; else None.
    """

    def __init__(
        self,
        hf_tokenizer: PreTrainedTokenizerFast,
        vocab_size: int | None = None,
        chat: bool = False,
        eos_token_id: int | None = None,
    ) -> None:
        """Sets a padding token if the tokenizer has none.

        Args:
            vocab_size: rows of the model's embedding. Where the tokenizer has no padding token, or
                one without a row, it gets one in a row that it does not use yet, else the end
                token.
            eos_token_id: what ends an answer, if that is not the tokenizer's end token.

        Raises:
            ValueError: it has no end token, or one without a row.
        """
        if hf_tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token: give one whose tokenizer_config.json names it"
            )
        limit = NO_VOCAB_LIMIT if vocab_size is None else vocab_size
        if hf_tokenizer.pad_token_id is None or hf_tokenizer.pad_token_id >= limit:
            _set_pad_token(hf_tokenizer, vocab_size or 0)
        self.hf_tokenizer, self.chat, self._vocab_size = hf_tokenizer, chat, limit
        self.eos_token_id = int(hf_tokenizer.eos_token_id) if eos_token_id is None else eos_token_id
        self.pad_token_id = int(hf_tokenizer.pad_token_id)
        self.language_codes = _language_codes(hf_tokenizer)
        self._lacks_rows = self.required_vocab_size > limit
        if self.eos_token_id >= limit:
            raise ValueError(
                "the end token "
                f"{format_value(hf_tokenizer.convert_ids_to_tokens(self.eos_token_id))} is number "
                f"{self.eos_token_id}, but the model's embedding has {vocab_size} rows: give the "
                "model's own --tokenizer, or --model.add_tokens with that token"
            )

    @property
    def required_vocab_size(self) -> int:
        """Number of embedding rows that the largest token id of the tokenizer needs."""
        codes = () if self.language_codes is None else self.language_codes.token_ids.values()
        return max(_required_vocab_size(self.hf_tokenizer), *(code + 1 for code in codes), 0)

    @property
    def identity_values(self) -> list[object]:
        """All settings of the tokenizer that determine a text's token ids, as JSON values."""
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        vocabulary = (
            sorted(self.hf_tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        )
        sentencepiece = [
            hashlib.sha256(model.serialized_model_proto()).hexdigest()
            for name in ("sp_model", "spm_source", "spm_target")
            if (model := getattr(self.hf_tokenizer, name, None)) is not None
        ]
        languages = [self.hf_tokenizer.init_kwargs.get(name) for name in ("src_lang", "tgt_lang")]
        return [vocabulary, self.eos_token_id, self.pad_token_id, sentencepiece, languages]

    def encode(
        self, texts: Iterable[str], *, add_special_tokens: bool = True
    ) -> Iterator[np.ndarray]:
        """Encode texts to token ids, int32 [n] each.

        Args:
            add_special_tokens: with those that the tokenizer puts around a text, such as T5's end
                token.
        """
        add_special_tokens = add_special_tokens and not self.chat
        for chunk in chunk_texts(texts):
            yield from self._encode_chunk(chunk, add_special_tokens)

    def _encode_chunk(
        self, texts: Sequence[str], add_special_tokens: bool, is_target: bool = False
    ) -> Iterator[np.ndarray]:
        """Encode some texts, as prompts or as targets, to token ids, int32 [n] each."""
        argument = {"text_target" if is_target else "text": list(texts)}
        with wrap_rust_panics():
            encoded = self.hf_tokenizer(
                **argument, add_special_tokens=add_special_tokens, verbose=False
            )["input_ids"]
        self._check_embedding_rows(texts, encoded)
        return (np.asarray(ids, np.int32) for ids in encoded)

    def encode_side(
        self, texts: Iterable[tuple[str, Languages]], is_target: bool
    ) -> Iterator[np.ndarray]:
        """Encode prompts or targets of an encoder-decoder with end tokens, int32 [n] each.

        A tokenizer that marks languages puts the text's code where its model expects it; Marian's
        has a vocabulary of pieces for each side.

        Raises:
            LanguageError: see `LanguageCodes.complete`.
        """
        for chunk in chunk_texts(texts):
            encoded: list[np.ndarray] = [np.zeros(0, np.int32)] * len(chunk)
            by_languages: dict[Languages, list[int]] = {}
            for i, (_, languages) in enumerate(chunk):
                by_languages.setdefault(languages, []).append(i)
            for languages, indices in by_languages.items():
                with self._select_languages(languages):
                    side_texts = [chunk[i][0] for i in indices]
                    if languages.target is not None and not is_target:
                        from data.language_codes import mark_target_language

                        side_texts = [
                            mark_target_language(self.hf_tokenizer, text, languages)
                            for text in side_texts
                        ]
                    ids = self._encode_chunk(side_texts, not self.chat, is_target)
                    for i, text_ids in zip(indices, ids, strict=True):
                        encoded[i] = self.append_eos(text_ids)
            yield from encoded

    def _select_languages(self, languages: Languages) -> AbstractContextManager[None]:
        """Context in which texts are encoded with the codes of these languages."""
        if self.language_codes is None:
            return nullcontext()
        return self.language_codes.using_languages(languages)

    def encode_with_loss_mask(self, texts: Iterable[Sequence[TextSpan]]) -> Iterator[TokenizedText]:
        """Encode texts, given as spans, with the end token and a loss mask.

        A text is tokenized as a whole. A token is in the loss if any of its characters is; the end
        token, as the last span is. Those of chats end as their template says.
        """
        for chunk in chunk_texts(texts):
            full_texts = ["".join(span.text for span in spans) for spans in chunk]
            for spans, encoding in zip(
                chunk, self.encode_with_offsets(full_texts, not self.chat), strict=True
            ):
                ids = np.asarray(encoding.ids, np.int32)
                loss_mask = _spans_to_loss_mask(spans, encoding)
                if not self.chat:
                    if not len(ids) or ids[-1] != self.eos_token_id:
                        ids = np.append(ids, np.int32(self.eos_token_id))
                        loss_mask = np.append(loss_mask, False)
                    loss_mask[-1] = spans[-1].in_loss
                yield TokenizedText(ids, loss_mask)

    def encode_doc_chunks(
        self, texts: Iterable[tuple[str, DocumentChunk]]
    ) -> Iterator[TokenizedText]:
        """Encode the chunks of a document to token ids, all of them in the loss.

        Concatenated, the chunks' tokens are those of the document and the end token.
        """
        for chunk in chunk_texts(texts):
            full_texts = [doc_chunk.context + text for text, doc_chunk in chunk]
            for (text, doc_chunk), encoding in zip(
                chunk, self.encode_with_offsets(full_texts, False), strict=True
            ):
                start = first_token_at_or_after(encoding, len(doc_chunk.context))
                if start is None:  # one token has characters of both
                    (encoding,), start = self.encode_with_offsets([text], False), 0
                prefix = [] if doc_chunk.context else self.affix_ids[0]
                ids = [
                    *prefix,
                    *encoding.ids[start:],
                    *([self.eos_token_id] if doc_chunk.is_last else []),
                ]
                yield TokenizedText(np.asarray(ids, np.int32), np.ones(len(ids), bool))

    @cached_property
    def affix_ids(self) -> tuple[list[int], list[int]]:
        """Special token ids that the tokenizer adds before and after a text."""
        encoded = self.hf_tokenizer(
            "a", add_special_tokens=not self.chat, return_special_tokens_mask=True
        )
        ids, mask = list(encoded["input_ids"]), encoded["special_tokens_mask"]
        start = next((i for i, special in enumerate(mask) if not special), 0)
        text = self.hf_tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids[:start], ids[start + len(text) :]

    def count_leading_special_tokens(self, ids: np.ndarray) -> int:
        """Count the leading special tokens, such as `<bos>`, that truncation keeps."""
        special_ids = {*self.affix_ids[0], self.hf_tokenizer.bos_token_id}
        leading = takewhile(special_ids.__contains__, ids.tolist())
        return sum(1 for _ in leading)

    @cached_property
    def num_end_tokens(self) -> int:
        """Number of special tokens at a text's end: the end token, and a language code after it."""
        has_code = self.language_codes is not None and self.language_codes.are_suffixes
        return 2 if has_code else 1

    def append_eos(self, ids: np.ndarray) -> np.ndarray:
        """Append the end token to token ids unless they end with it, int32 [n]."""
        if self.eos_token_id in ids[-self.num_end_tokens :]:
            return ids
        return np.append(ids, np.int32(self.eos_token_id))

    def encode_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> Sequence[Encoding]:
        """Encode texts with the tokenizers library, which also gives character offsets."""
        with wrap_rust_panics():
            encodings = self.hf_tokenizer(
                list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False,
                return_token_type_ids=False, verbose=False,
            ).encodings  # fmt: skip
        assert encodings is not None, "the tokenizer is none of the tokenizers library"
        self._check_embedding_rows(texts, (encoding.ids for encoding in encodings))
        return list(encodings)

    def _check_embedding_rows(self, texts: Sequence[str], tokens: Iterable[Sequence[int]]) -> None:
        """Raise MissingEmbeddingRowError for a token without an embedding row."""
        if not self._lacks_rows:
            return
        for text, ids in zip(texts, tokens, strict=True):
            unknown_id = next((token for token in ids if token >= self._vocab_size), None)
            if unknown_id is not None:
                raise MissingEmbeddingRowError(
                    text, self.hf_tokenizer.convert_ids_to_tokens(unknown_id), self._vocab_size
                )

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """UTF-8 bytes of each token; a token can be a part of a character.

        Args:
            vocab_size: rows of the model's embedding; those without a token print nothing.
        """
        ids = self.hf_tokenizer("abc", add_special_tokens=False)["input_ids"]
        context_tokens = self.hf_tokenizer.convert_ids_to_tokens(ids)
        start = len(self.hf_tokenizer.convert_tokens_to_string(context_tokens))
        of_bytes = _byte_of_character(self.hf_tokenizer)
        pieces = [b""] * vocab_size
        for token, number in self.hf_tokenizer.get_vocab().items():
            if number >= vocab_size:
                continue
            if token and all(letter in of_bytes for letter in token):
                pieces[number] = bytes(of_bytes[letter] for letter in token)
            elif byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
                pieces[number] = bytes.fromhex(byte[1])
            else:
                text = self.hf_tokenizer.convert_tokens_to_string([*context_tokens, token])
                pieces[number] = text[start:].encode()
        return pieces

    def find_lost_characters(self, texts: Iterable[str]) -> tuple[list[str], list[str]]:
        """Characters that encoding and decoding lose: unknown ones, and changed ones.

        A changed character is decoded in another form, such as lower case.
        """
        texts = list(texts)
        characters = sorted(set[str]().union(*texts) - {" "})
        unknown, changed = self._find_lost_characters_of_side(texts, characters, False)
        if hasattr(self.hf_tokenizer, "spm_target"):  # targets have pieces of their own
            of_targets = self._find_lost_characters_of_side(texts, [*unknown, *changed], True)
            unknown, changed = ([c for c in side if c in {*of_targets[0], *of_targets[1]}]
                                for side in (unknown, changed))  # fmt: skip
        return unknown, changed

    def _find_lost_characters_of_side(
        self, texts: Sequence[str], characters: Sequence[str], is_target: bool
    ) -> tuple[list[str], list[str]]:
        """Characters that the tokenizer loses in texts of one kind, prompts or targets."""
        decoded_alone = self._encode_and_decode(characters, is_target)
        decoded_amid_letters = self._encode_and_decode(
            map(_put_between_letters, characters), is_target
        )
        unknown, changed = list[str](), list[str]()
        for c, *back in zip(characters, decoded_alone, decoded_amid_letters, strict=True):
            pairs = [(c, back[0]), (_put_between_letters(c), back[1])]
            if any(_survives_round_trip(pair, c) for pair in pairs):
                continue
            # A letter that is unknown alone may be a part of known words.
            word = _find_word_containing(c, next(text for text in texts if c in text))
            pairs.append((word, self._encode_and_decode([word], is_target)[0]))
            if not _survives_round_trip(pairs[-1], c):
                is_changed = any(
                    _survives_round_trip(
                        (_fold_case_and_accents(a), _fold_case_and_accents(b)),
                        _fold_case_and_accents(c),
                    )
                    for a, b in pairs
                )
                (changed if is_changed else unknown).append(c)
        return unknown, changed

    @cached_property
    def preserves_repeated_spaces(self) -> bool:
        """True if repeated spaces survive encoding and decoding."""
        (text,) = self._encode_and_decode([_put_between_letters(REPEATED_SPACES)])
        return REPEATED_SPACES in text

    def _encode_and_decode(self, texts: Iterable[str], is_target: bool = False) -> list[str]:
        """Encode and decode texts; unknown tokens are left out of the decoded texts."""
        unk_id = self.hf_tokenizer.unk_token_id
        encoded = (
            ids for chunk in chunk_texts(texts)
            for ids in self._encode_chunk(chunk, not self.chat, is_target)
        )  # fmt: skip
        rows = [[token for token in ids.tolist() if token != unk_id] for ids in encoded]
        return self.decode(rows, is_target) if rows else []  # the tokenizer decodes no empty list

    def decode(
        self, tokens: np.ndarray | Sequence[Sequence[int]], is_target: bool = True
    ) -> list[str]:
        """Decode rows of token ids to texts, without special tokens and language codes."""
        if self.language_codes is not None:  # M2M100's codes are not always special tokens
            codes = {*self.language_codes.token_ids.values()}
            tokens = [[token for token in map(int, row) if token not in codes] for row in tokens]
        if getattr(self.hf_tokenizer, "separate_vocabs", False):
            return [self._decode_side(row, is_target) for row in tokens]
        decoded: list[str] = self.hf_tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return decoded

    def _decode_side(self, tokens: Sequence[int] | np.ndarray, is_target: bool) -> str:
        """Decode ids of one of the two vocabularies of Marian's tokenizer, up to the end token.

        transformers leaves the source's padding token out, whose id is an ordinary piece's of the
        target's vocabulary.
        """
        hf: Any = self.hf_tokenizer
        model = hf.spm_target if is_target else hf.spm_source
        ids = takewhile(lambda token: token != self.eos_token_id, map(int, tokens))
        return str(model.decode_pieces([self._pieces[is_target][token] for token in ids]))

    @cached_property
    def _pieces(self) -> tuple[dict[int, str], dict[int, str]]:
        """Text pieces, by id, of the two vocabularies of Marian's tokenizer."""
        hf: Any = self.hf_tokenizer
        return {number: piece for piece, number in hf.encoder.items()}, hf.decoder


REPEATED_SPACES = "  "
"""Stands for repeated spaces in a set of characters."""


def collect_characters(texts: Iterable[str]) -> set[str]:
    """Collect the characters in texts; repeated spaces are included as `REPEATED_SPACES`."""
    characters = set[str]()
    for text in texts:
        characters.update(text)
        if REPEATED_SPACES in text:
            characters.add(REPEATED_SPACES)
    return characters


def save_tokenizer(
    tokenizer: Tokenizer, run: RunFolder, settings: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Save a tokenizer in the run folder, unless the folder has one.

    Args:
        settings: of the model's generation_config.json, which lies with its tokenizer.

    Raises:
        WriteError: it cannot be written.
    """

    from huggingface.generation_config import GENERATION_CONFIG

    def write_tokenizer_files(draft: Path) -> None:
        tokenizer.hf_tokenizer.save_pretrained(draft)
        if settings:
            write_json(draft / GENERATION_CONFIG, settings)

    if not run.tokenizer_folder.exists():
        write_folder_atomically("the tokenizer", run.tokenizer_folder, write_tokenizer_files)


def find_saved_tokenizer(run: RunFolder) -> Path | None:
    """Folder of the tokenizer saved in a run folder; None if the run has none."""
    path = run.tokenizer_folder.absolute()
    return path if path.is_dir() else None


def warn_truncated_answers(
    answers: np.ndarray, tokenizer: Tokenizer, stop_texts: Sequence[str] = ()
) -> None:
    """Print how many generated answers, int32 [n, length], reached the token limit.

    An answer is whole if it has an end token, or ends with one of the stop texts.
    """
    is_complete = (answers == tokenizer.eos_token_id).any(axis=1)
    if stop_texts:
        is_complete |= (
            answers[:, -1] == tokenizer.pad_token_id
        )  # something ended it before the limit
        cut_texts = tokenizer.decode(answers[~is_complete])
        is_complete[~is_complete] = [any(stop in text for stop in stop_texts) for text in cut_texts]
    num_cut = int(np.count_nonzero(~is_complete))
    if num_cut:
        say(
            f"{num_cut} of {len(answers)} answers were cut at {answers.shape[1]} tokens: "
            "--generation.max_tokens sets the limit"
        )


def _put_between_letters(character: str) -> str:
    """Put a letter before and after a character, since tokens can depend on neighbors."""
    neighbor = "b" if _fold_case_and_accents(character) == "a" else "a"
    return f"{neighbor}{character}{neighbor}"


def _find_word_containing(character: str, text: str) -> str:
    """The word of a text that contains a character, shortened if it is long."""
    position = text.index(character)
    start, end = text.rfind(" ", 0, position) + 1, text.find(" ", position)
    end = len(text) if end < 0 else end
    return text[max(start, position - MAX_WORD_CONTEXT) : min(end, position + MAX_WORD_CONTEXT)]


def _fold_case_and_accents(text: str) -> str:
    """Convert a text to lower case without accents."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in plain if not unicodedata.combining(c))


def _survives_round_trip(original_and_decoded: tuple[str, str], character: str) -> bool:
    """True if decoding the encoded text restores all occurrences of a character."""
    text, back, normalized = (
        unicodedata.normalize("NFKC", s) for s in (*original_and_decoded, character)
    )
    return bool(normalized) and back.count(normalized) >= max(text.count(normalized), 1)


def _spans_to_loss_mask(spans: Sequence[TextSpan], encoding: Encoding) -> np.ndarray:
    """Create the mask of tokens that overlap character spans in the loss, bool [n]."""
    mask, start = np.zeros(len(encoding.ids), bool), 0
    for span in spans:
        end = start + len(span.text)
        if span.in_loss:
            mask[slice(*_token_range_of_characters(encoding, start, end))] = True
        start = end
    return mask


def _token_range_of_characters(encoding: Encoding, start: int, end: int) -> tuple[int, int]:
    """Range [first, end) of the tokens that cover the characters in [start, end).

    A token without characters counts as the one that follows it; special tokens that are not in the
    text, as none. Asking for single ones is faster than reading the places of all.
    """
    tokens = (encoding.char_to_token(position) for position in range(start, end))
    first_token = next((token for token in tokens if token is not None), None)
    if first_token is None:
        return 0, 0
    last_token = first_token

    def token_start(token: int) -> int:
        """Character offset at which a token starts; -1 if the token is not in the text."""
        if not 0 <= token < len(encoding.ids):
            return -1
        char_span = encoding.token_to_chars(token)
        return -1 if char_span is None or char_span[1] == 0 else int(char_span[0])

    while token_start(first_token - 1) >= start:
        first_token -= 1
    tokens = (encoding.char_to_token(position) for position in range(end - 1, start - 1, -1))
    last_token = max(last_token, next((token for token in tokens if token is not None), last_token))
    while 0 <= token_start(last_token + 1) < end:
        last_token += 1
    return first_token, last_token + 1


def first_token_at_or_after(encoding: Encoding, start: int) -> int | None:
    """Index of the first token at or after a character; None if a token straddles it."""
    if start == 0:
        return 0
    index = _token_range_of_characters(encoding, 0, start)[1]
    char_span = encoding.token_to_chars(index - 1) if index else None
    return None if char_span is not None and char_span[1] > start else index


def _byte_of_character(hf_tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Map characters that stand for bytes in tokens (GPT-2, ByT5) to bytes; else empty."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if not hf_tokenizer.vocab_files_names:
        return {chr(byte): byte for byte in range(256)}
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    if '"ByteLevel"' not in json.dumps(decoder):
        return {}
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def add_tokens(hf_tokenizer: PreTrainedTokenizerFast, tokens: Iterable[str]) -> None:
    """Add missing tokens to a tokenizer's vocabulary."""
    known = hf_tokenizer.get_vocab()
    hf_tokenizer.add_tokens([name for name in tokens if name not in known])


def _language_codes(hf_tokenizer: PreTrainedTokenizerFast) -> LanguageCodes | None:
    """Language codes of a tokenizer; None if it marks no languages."""
    has_codes = all(hasattr(hf_tokenizer, name) for name in ("src_lang", "tgt_lang"))
    if not (has_codes and hasattr(type(hf_tokenizer), "src_lang")):
        return None
    from data.language_codes import LanguageCodes

    return LanguageCodes(hf_tokenizer)


def _set_pad_token(hf_tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Set a padding token that has an embedding row: a new token, or the end token."""
    reason = "the tokenizer has no padding token"
    if hf_tokenizer.pad_token_id is not None:
        reason = (
            "the model's embedding has no row for the padding token "
            f"{format_value(hf_tokenizer.pad_token)}"
        )
    pad_id = hf_tokenizer.get_vocab().get(DEFAULT_PAD_TOKEN)
    has_row = (
        _required_vocab_size(hf_tokenizer) < vocab_size
        if pad_id is None
        else pad_id < (vocab_size or NO_VOCAB_LIMIT)
    )
    hf_tokenizer.add_special_tokens(
        {"pad_token": DEFAULT_PAD_TOKEN if has_row else hf_tokenizer.eos_token}
    )
    description = "a token of its own" if has_row else "the end token"
    say(f"{reason}: {format_value(hf_tokenizer.pad_token)}, {description}, becomes it")


def _required_vocab_size(hf_tokenizer: PreTrainedTokenizerFast) -> int:
    return max(len(hf_tokenizer), *(i + 1 for i in hf_tokenizer.get_vocab().values()))


def chunk_texts(items: Iterable[T]) -> Iterator[list[T]]:
    """Split texts into lists of up to `CHUNK_TEXTS`, to be tokenized at once."""
    remaining = iter(items)
    while chunk := list(islice(remaining, CHUNK_TEXTS)):
        yield chunk
