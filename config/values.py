"""Value types of configuration fields: checking and parsing.

A field is a `bool`, an `int`, a `float`, a `str` or a `Literal` of strings; `| None` makes it
optional, `| Literal["auto"]` lets a number be "auto", and `Annotated[..., Rule(...)]` narrows it.
`ValueType.from_annotation` turns such an annotation into the object that YAML, the command line and
plain construction check with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from config.errors import find_similar_names
from files.formatting import format_names, format_value

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class ValueRule:
    """A condition on the value of a configuration field.

    `text` completes the sentence "must be …"; `lists`: values are several names or numbers,
    separated by commas.
    """

    text: str
    holds: Callable[[Any], bool]
    lists: bool = False


def comma_separated_names(*names: str) -> ValueRule:
    """Returns the rule for a comma-separated list of the given names."""
    text = f"{' or '.join(names)}, separated by commas"
    return ValueRule(
        text, lambda value: value != "" and {*split_names(value)} <= {*names}, lists=True
    )


LARGEST_INT = 2**63 - 1
"""The largest integer of any field: what 64 bits hold, and so NumPy, JAX and file formats."""

MAX_LISTED = 240
"""Characters of the choices that a message lists in full."""

MAX_LAYERS = 1024
"""Layers of a model: the deepest published transformers have 1,000. Each is a graph's calls, which
take time and memory even in a plan."""

MAX_BEAMS = 1024
"""Beams of a search: each is a sequence with caches of its own."""

PositiveInt = Annotated[int, ValueRule("a positive integer", lambda value: value > 0)]
LayerCount = Annotated[
    int, ValueRule(f"an integer from 1 to {MAX_LAYERS}", lambda value: 0 < value <= MAX_LAYERS)
]
BeamCount = Annotated[
    int, ValueRule(f"an integer from 1 to {MAX_BEAMS}", lambda value: 0 < value <= MAX_BEAMS)
]
NonNegativeInt = Annotated[int, ValueRule("an integer, 0 or more", lambda value: value >= 0)]
PositiveFloat = Annotated[float, ValueRule("a positive number", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, ValueRule("a number, 0 or more", lambda value: value >= 0)]
Fraction = Annotated[float, ValueRule("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Proportion = Annotated[
    float, ValueRule("a number above 0, and at most 1", lambda value: 0 < value <= 1)
]
Number = Annotated[float, ValueRule("a number", lambda value: True)]
Probability = Annotated[
    float, ValueRule("a number from 0 up to, not including, 1", lambda value: 0 <= value < 1)
]

Address = Annotated[
    str, ValueRule("an address such as s3://bucket/run", lambda v: is_object_store_url(v))
]
Names = Annotated[
    str,
    ValueRule(
        "names, separated by commas", lambda value: value != "" and all(split_names(value)), True
    ),
]
Lengths = Annotated[
    str,
    ValueRule(
        "positive integers, separated by commas",
        lambda value: value != "" and all(_is_length(length) for length in split_names(value)),
        True,
    ),
]
Factors = Annotated[
    str, ValueRule("positive numbers, separated by commas", lambda value: _are_numbers(value), True)
]
PathText = Annotated[
    str, ValueRule("text that can be a path or name", lambda value: _is_path(value))
]

_ADDRESS = re.compile("[a-z][a-z0-9+]*://.")
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_WORDS: dict[str, Scalar] = {"true": True, "false": False}
_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
              "cuda": "gpu"}  # fmt: skip
"""Names that others have for a choice."""
_NONE_WORDS = ("null", "none")


@dataclass(frozen=True)
class ValueType:
    """Type of a configuration field: the values that it accepts.

    Attributes:
        kind: type of a value.
        choices: the strings that it may be; with a number as `kind`, in place of a number.
        optional: whether it may be None.
    """

    kind: type
    choices: tuple[str, ...] = ()
    optional: bool = False
    rule: ValueRule | None = None

    @staticmethod
    @cache
    def from_annotation(annotation: Any) -> ValueType:
        """Returns the value type for a field's type annotation.

        Raises:
            TypeError: if no configuration field can have this annotation.
        """
        origin = get_origin(annotation)
        if origin is Annotated:
            inner, rule = get_args(annotation)
            return ValueType(ValueType.from_annotation(inner).kind, rule=rule)
        if origin is Literal:
            return ValueType(str, choices=get_args(annotation))
        if origin in (Union, UnionType):
            inner, other = get_args(annotation)
            some = ValueType.from_annotation(inner)
            if other is NoneType:
                return replace(some, optional=True)
            if get_origin(other) is Literal:
                return replace(some, choices=get_args(other))
        if annotation in _NOUNS:
            return ValueType(annotation)
        raise TypeError(f"a configuration field cannot have the type {annotation}")

    @property
    def is_list(self) -> bool:
        """True if a value is a list of names or numbers, separated by commas."""
        return self.rule is not None and self.rule.lists

    def describe_valid_values(self) -> str:
        """Returns the valid values as text that completes "must be …"."""
        noun = self.rule.text if self.rule else _NOUNS[self.kind]
        if self.choices:
            listed = ", ".join(self.choices)
            listed = format_names(self.choices) if len(listed) > MAX_LISTED else listed
            noun = f"one of {listed}" if self.kind is str else f"{listed}, or {noun}"
        return noun + (", or null" if self.optional else "")

    def help_placeholder(self) -> str:
        """Returns the placeholder of a value in `--help`."""
        if self.choices:
            words = ["true", "false"] if self.kind is bool else [self.kind.__name__.upper()]
            listed = "{" + ",".join([*self.choices, *(words if self.kind is not str else [])]) + "}"
            return listed if len(listed) < 48 else "NAME"  # the help text says which
        return "true|false" if self.kind is bool else self.kind.__name__.upper()

    def check(self, value: Any, name: str) -> Scalar:
        """Returns `value` converted to this type; raises ValueError if it is invalid.

        An int counts as a float, and so does text that spells a number, since YAML reads `5e-6`
        (no dot) as text; and it reads 0.1 as a number, which is text where a field may be a
        fraction or a name. A list of names or numbers becomes one text where a field has several,
        one of one number that number. A choice may be spelled as others do.
        Nothing else is converted; a bool is never a number.

        Raises:
            ValueError: naming the field, the value and the rule.
        """
        if value is None and self.optional:
            return None
        value = _unwrap_single(value) if self.kind in (int, float) else value
        converted = _to_float(value) if self.kind is float else value
        if self.kind is str and type(value) in (int, float):
            converted = repr(value)
        if self.is_list and isinstance(value, list) and {*map(type, value)} <= {str, int, float}:
            converted = ",".join(map(str, value))
        if self.choices and isinstance(converted, str):
            converted = self._normalize_choice(converted)
        if isinstance(converted, Scalar) and self._is_valid(converted):
            return converted
        raise ValueError(
            f"{name} is {format_value(value)}, but must be {self._describe_valid_for(converted)}"
        )

    def parse(self, text: str, name: str) -> Scalar:
        """Parses the text of a command-line argument; raises as `check` does."""
        if self.optional and text.lower() in _NONE_WORDS:
            return None
        value: Scalar = text
        if self.kind is bool:
            value = _WORDS.get(text.lower(), text)
        elif self.kind is int:
            value = _to_int(text)
        return self.check(value, name)

    def _normalize_choice(self, text: str) -> str:
        """Returns the choice that a text spells, such as bfloat16 for BF16; else the text."""
        name = text.rpartition(".")[2].lower()
        name = _SPELLINGS.get(name, name)
        return text if text in self.choices or name not in self.choices else name

    def _describe_valid_for(self, value: object) -> str:
        """Returns a description of the valid values, for the error about this value."""
        if type(value) is int and self.kind is int and abs(value) > LARGEST_INT:
            return "an integer below 2^63"
        is_long = len(", ".join(self.choices)) > MAX_LISTED
        similar = (
            find_similar_names(value, self.choices) if is_long and isinstance(value, str) else []
        )
        hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
        return self.describe_valid_values() + hint

    def _is_valid(self, value: Scalar) -> bool:
        if value in self.choices and isinstance(value, str):
            return True
        if type(value) is not self.kind:  # not isinstance, since a bool is an int
            return False
        if self.choices and self.kind is str:
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            return False
        if isinstance(value, str) and not _is_unicode(value):
            return False
        return self.rule is None or self.rule.holds(value)


def _unwrap_single(value: Any) -> Any:
    """Returns the item of a one-item list (Graphcore's per-device values), else `value`."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def split_names(text: str | None) -> tuple[str, ...]:
    """Returns the comma-separated names of a text."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def parse_numbers(text: str | None) -> tuple[float, ...]:
    """Returns the comma-separated numbers in a text."""
    return tuple(map(float, split_names(text)))


def _is_length(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def _are_numbers(text: str) -> bool:
    try:
        return text != "" and all(0 < x < math.inf for x in parse_numbers(text))
    except ValueError:
        return False


def is_object_store_url(text: str) -> bool:
    """Returns whether a text is the URL of an object store."""
    return _is_path(text) and _ADDRESS.match(text) is not None


def _is_path(text: str) -> bool:
    """Returns whether a text is a valid path: printable, not empty and not too long."""
    lengths = [len(part.encode()) for part in text.split("/")]
    return text.isprintable() and text.strip() != "" and len(text) < 4096 and max(lengths) <= 255


def _is_unicode(text: str) -> bool:
    """Returns whether files can store a text: valid UTF-8 without NUL characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _to_float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value


def _to_int(text: str) -> Scalar:
    try:
        return int(text)
    except ValueError:
        return text
