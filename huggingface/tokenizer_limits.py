"""Protection against malicious tokenizers: unbounded text growth, and crashes in the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import regex

from files.errors import UserError
from files.formatting import format_name, format_path
from files.json_files import read_json_object

MAX_GROWTH = 1000
"""Factor by which a tokenizer's replacements may lengthen a text."""
TOKENIZER_FILE = "tokenizer.json"


@contextmanager
def wrap_rust_panics() -> Iterator[None]:
    """Convert a Rust panic of the tokenizers library into a UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer fails on a text ({format_name(str(error).strip(), 80)}): its "
            f"{TOKENIZER_FILE} is damaged, or made to; give another --tokenizer"
        ) from None


def check_text_growth(file: Path) -> None:
    """Raise UserError if a tokenizer file can lengthen a text beyond `MAX_GROWTH`.

    A missing file passes.
    """
    if not file.is_file():
        return
    tokenizer_json = read_json_object(file).data
    for component in ("normalizer", "decoder"):
        if max_text_growth(tokenizer_json.get(component)) > MAX_GROWTH:
            raise UserError(
                f"{format_path(file)}: the replacements of its {component} lengthen a text more "
                f"than {MAX_GROWTH:,} times: give another --tokenizer"
            )


def max_text_growth(component: Any) -> float:
    """Maximum factor by which a tokenizer's normalizer or decoder can lengthen a text."""
    if not isinstance(component, dict):
        return 1.0
    growth = 1.0
    for name in ("normalizers", "decoders"):
        for child in component.get(name) or () if isinstance(component.get(name), list) else ():
            growth *= max_text_growth(child)
    if component.get("type") != "Replace" or not isinstance(component.get("content"), str):
        return growth
    content, pattern = len(component["content"]), component.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return growth * max(1.0, content / len(text))
    is_between = text == "" or _matches_empty(pattern)
    return growth * max(1.0, content + is_between)


def _matches_empty(pattern: Any) -> bool:
    """True if a regular expression can match the empty string, also if the check times out."""
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    try:
        return regex.match(str(expression), "", timeout=1.0) is not None
    except (regex.error, TimeoutError):  # it may
        return True
