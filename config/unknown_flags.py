"""Translation of other trainers' flags to flags of this program, for error messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from config.errors import ConfigError
from config.other_trainers_flags import FLAGS, OMIT, Flag
from files.formatting import format_name

_BY_NAME = {name: flag for flag in FLAGS for name in flag.names.split()}
_WORDS = {"": "true", "1": "true", "yes": "true", "0": "false", "no": "false"}
"""Other spellings of the values of a switch."""


def check_foreign_flags(arguments: Sequence[str]) -> None:
    """Raises ConfigError with translations if a command line has flags of other trainers."""
    clauses = list(dict.fromkeys(_translate_foreign_flags(arguments)))
    if clauses:
        raise ConfigError(f"flags of other trainers: {'; '.join(clauses)}")


def _translate_foreign_flags(arguments: Sequence[str]) -> Iterator[str]:
    """Yields a clause of the error message for each foreign flag on the command line."""
    for index, argument in enumerate(arguments):
        typed_flag, equals, value = argument.partition("=")
        flag = (
            _BY_NAME.get(typed_flag[2:].replace("-", "_")) if typed_flag.startswith("--") else None
        )
        following = takewhile(lambda text: not text.startswith("--"), arguments[index + 1 :])
        typed_value = value if equals else ",".join(following)
        if flag is not None and typed_value not in flag.native_values:
            yield translate_flag(flag, typed_flag, typed_value)


def translate_flag(flag: Flag, typed_flag: str, typed_value: str) -> str:
    """Returns a clause that names the replacement of a foreign flag.

    Args:
        typed_flag: the flag as it was typed.
        typed_value: its value; "": it has none.
    """
    value_text = f" {format_name(typed_value, 60)}".rstrip()
    if not flag.replacement and not flag.values:
        return f"there is no {typed_flag}: {flag.hint}"
    replacement_text = _find_replacement(flag, typed_value.lower())
    if replacement_text == OMIT:
        return f"leave out {typed_flag}{value_text}"
    if replacement_text is None and flag.passes_other_values:
        replacement_text = flag.replacement_with_value(value_text.lstrip())
    hint = f" ({flag.hint})" if flag.hint else ""
    if replacement_text is None:
        return f"there is no {typed_flag}{value_text}: give {_format_choices(flag)}{hint}"
    return f"for {typed_flag}{value_text} give {replacement_text}{hint}"


def _find_replacement(flag: Flag, typed_value: str) -> str | None:
    """Returns the registry's replacement for a foreign flag's value; None without one."""
    values = flag.values
    if "true" in values and typed_value not in values:
        typed_value = _WORDS.get(typed_value, typed_value)
        if values.keys() <= {"true", "false"} and typed_value != "false":
            typed_value = "true"  # a switch: what follows is no value of it
        if typed_value == "false" and typed_value not in values:
            return OMIT
    return flag.replacement_for_choice(values[typed_value]) if typed_value in values else None


def _format_choices(flag: Flag) -> str:
    """Returns the replacements of a foreign flag for all values in the registry."""
    whole = [choice for choice in flag.values.values() if choice.startswith("--")]
    plain = [choice for choice in flag.values.values() if choice not in ("", OMIT, *whole)]
    of_ours = [f"{flag.replacement} {'|'.join(dict.fromkeys(plain))}"] if plain else []
    return " or ".join(dict.fromkeys([*of_ours, *whole])) or flag.replacement
