"""Field types: what they accept, what they turn it into, what they say otherwise."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Literal

import pytest

from config.base import nest_by_path
from config.errors import ConfigError
from config.t5 import T5Config
from config.values import Fraction, PositiveFloat, PositiveInt, Probability, ValueType


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (float, "5e-6", 5e-6),  # how YAML 1.1 reads a number without a dot
        (float, 3, 3.0),
        (PositiveFloat, "1e-3", 1e-3),
        (int, 3, 3),
        (bool, True, True),
        (str, "x", "x"),
        (PositiveInt | None, None, None),
        (PositiveInt | None, 2, 2),
        (Literal["a", "b"], "b", "b"),
        (PositiveInt | Literal["auto"], "auto", "auto"),
        (PositiveInt | Literal["auto"], 2, 2),
    ],
)
def test_accepted(annotation, value, expected):
    checked = ValueType.from_annotation(annotation).check(value, "field")
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "rule"),
    [
        (int, 3.0, "an integer"),
        (int, "3", "an integer"),
        (int, True, "an integer"),
        (float, True, "a number"),
        (float, "many", "a number"),
        (float, math.nan, "a number"),
        (float, "inf", "a number"),
        (float, [1.0, 2.0], "a number"),
        (bool, 1, "true or false"),
        (bool, "true", "true or false"),
        (str, True, "text"),
        (str, None, "text"),
        (PositiveInt, 0, "a positive integer"),
        (Probability, 1.0, "a number from 0 up to, not including, 1"),
        (PositiveInt | None, 0, "a positive integer, or null"),
        (Literal["a", "b"], "c", "one of a, b"),
        (PositiveInt | Literal["auto"], 0, "auto, or a positive integer"),
        (PositiveInt | Literal["auto"], "all", "auto, or a positive integer"),
        (PositiveInt | Literal["auto"], None, "auto, or a positive integer"),
    ],
)
def test_refused(annotation, value, rule):
    with pytest.raises(ValueError) as info:
        ValueType.from_annotation(annotation).check(value, "the.field")
    assert str(info.value) == f"the.field is {value!r}, but must be {rule}"


@pytest.mark.parametrize(
    ("annotation", "text", "expected"),
    [
        (bool, "true", True),
        (bool, "False", False),
        (int, "12", 12),
        (float, "12", 12.0),
        (str, "12", "12"),
        (str | None, "none", None),
        (PositiveFloat | None, "null", None),
    ],
)
def test_parsed_from_text(annotation, text, expected):
    parsed = ValueType.from_annotation(annotation).parse(text, "field")
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(("annotation", "text"), [(bool, "yes"), (int, "1.5"), (int, "four")])
def test_text_refused(annotation, text):
    with pytest.raises(ValueError, match=f"field is '{text}', but must be"):
        ValueType.from_annotation(annotation).parse(text, "field")


@pytest.mark.parametrize("annotation", [list[int], int | str, dict])
def test_types_no_field_can_have(annotation):
    with pytest.raises(TypeError):
        ValueType.from_annotation(annotation)


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("model.layers", 1024, {}),
        ("generation.num_beams", 1024, {"generation.search": "beam"}),
        ("execution.data_parallel", 2**14, {"execution.micro_batch_size": 1}),
    ],
)
def test_limits_that_the_documents_name(field, most, more):
    for value, error in (
        (most, nullcontext()),
        (most + 1, pytest.raises(ConfigError, match=field)),
    ):
        given = {"family": "t5", "training.global_batch_size": value, field: value, **more}
        with error:
            T5Config.from_dict(nest_by_path(given))


def test_a_list_of_one_number_is_that_number():
    """As Graphcore's YAML has `available_memory_proportion: [0.4]`."""
    optional = ValueType.from_annotation(Fraction | None)
    assert optional.check([0.4], "a field") == 0.4
    assert ValueType.from_annotation(PositiveInt).check([8], "a field") == 8
    for value in ([0.4, 0.4], [], [[0.4]], ["half"]):
        with pytest.raises(ValueError, match="must be a number from 0 to 1"):
            optional.check(value, "a field")
    with pytest.raises(ValueError, match="must be true or false"):
        ValueType.from_annotation(bool).check([True], "a field")
