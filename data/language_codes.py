"""Language codes in the tokenizers of translation models: NLLB, M2M100, mBART and Marian.

NLLB, M2M100 and mBART-50 put the code before a text, mBART of 25 languages after its end token. An
answer has the target's code at the same end: there, a translation begins with it; here, the decoder
starts with it. Marian models of several target languages read the code before the source instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from config.errors import find_similar_names
from data.examples import LanguageError, Languages
from files.formatting import format_name, format_names, format_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LISTED = 100
"""Characters of a list of known languages in a message."""


class LanguageCodes:
    """Language codes of a tokenizer that marks each text with the code of its language.

    Attributes:
        hf_tokenizer: the tokenizer of transformers.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf_tokenizer: Any = hf_tokenizer

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Token id of each language code, such as eng_Latn, including codes among added tokens."""
        tokens: dict[str, str] = getattr(self.hf_tokenizer, "lang_code_to_token", {})
        if not tokens:  # but M2M100, whose code en is the token __en__
            added = self.hf_tokenizer.added_tokens_encoder
            tokens = {token: token for token in added if not token.startswith("<")}
        ids = {
            code: self.hf_tokenizer.convert_tokens_to_ids(token) for code, token in tokens.items()
        }
        unk_id = self.hf_tokenizer.unk_token_id
        return {code: token_id for code, token_id in ids.items() if token_id != unk_id}

    def token_id(self, language: str) -> int:
        """Token id of the code of a language.

        Raises:
            LanguageError: the tokenizer does not know it.
        """
        if language not in self.token_ids:
            raise LanguageError(
                f"the tokenizer has no language {format_value(language)}{self._suggest(language)}"
            )
        return self.token_ids[language]

    @cached_property
    def are_suffixes(self) -> bool:
        """True if the language code follows the text's end token, as in mBART of 25 languages."""
        if not self.token_ids:
            return False
        language = next(iter(self.token_ids))
        with self._use_languages(language, language):
            ids = self.hf_tokenizer(text_target="a")["input_ids"]
        return bool(ids[-1] == self.token_ids[language])

    def with_defaults(self, languages: Languages) -> Languages:
        """Languages of a text, with missing ones filled in from the tokenizer's files.

        Raises:
            LanguageError: one is missing, or has no code.
        """
        settings = self.hf_tokenizer.init_kwargs
        source = languages.source or settings.get("src_lang")
        target = languages.target or settings.get("tgt_lang")
        for side, language in (("source", source), ("target", target)):
            if language is None:
                raise LanguageError(
                    f"the tokenizer marks texts with their language: give --data.{side}_language, "
                    f"such as {self._example_code()}, or rows with a column {side}_language"
                )
            self.token_id(language)
        return Languages(source, target)

    @contextmanager
    def using_languages(self, languages: Languages) -> Iterator[None]:
        """Context in which the tokenizer encodes texts with these source and target languages."""
        try:
            source, target = self.with_defaults(languages)
        except LanguageError as error:
            error.languages = languages
            raise
        with self._use_languages(source, target):
            yield

    @contextmanager
    def _use_languages(self, source: str | None, target: str | None) -> Iterator[None]:
        # The state that digests see must not depend on what was encoded before.
        previous = self.hf_tokenizer.src_lang, self.hf_tokenizer.tgt_lang
        self.hf_tokenizer.src_lang, self.hf_tokenizer.tgt_lang = source, target
        try:
            yield
        finally:
            self.hf_tokenizer.src_lang, self.hf_tokenizer.tgt_lang = previous

    def _example_code(self) -> str:
        return format_name(next(iter(self.token_ids), "en"))

    def _suggest(self, language: str) -> str:
        """Advice for an error message: language codes similar to an unknown one."""
        same_start = [code for code in self.token_ids if code[:2].lower() == language[:2].lower()]
        close = [*dict.fromkeys([*find_similar_names(language, self.token_ids), *same_start])][:3]
        if close:
            return f"; did you mean {' or '.join(map(format_name, close))}?"
        return f"; it has: {format_names(list(self.token_ids), MAX_LISTED)}"


def mark_target_language(
    hf_tokenizer: PreTrainedTokenizerBase, text: str, languages: Languages
) -> str:
    """Put the target language's code before a source text, if Marian's tokenizer has several.

    Raises:
        LanguageError: it has no such code.
    """
    codes: list[str] = getattr(hf_tokenizer, "supported_language_codes", [])
    if not codes or languages.target is None or text.startswith(">>"):
        return text
    code = f">>{languages.target}<<"
    if code not in codes:
        raise LanguageError(
            f"the tokenizer has no language {format_value(languages.target)}; it has: "
            f"{format_names([known.strip('<>') for known in codes], MAX_LISTED)}"
        )
    return f"{code} {text}"
