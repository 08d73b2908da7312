"""Sections: building, checking, listing, and the docstrings under fields."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from config.base import ConfigSection, config_fields, field_docs
from config.errors import ConfigError
from config.families import FAMILIES
from config.values import PositiveInt


@dataclass(frozen=True)
class Wheel(ConfigSection):
    spokes: PositiveInt = 8
    """How many
    spokes."""

    price: float = 1.0
    """In euros."""


@dataclass(frozen=True)
class Cart(ConfigSection):
    name: str = "cart"
    """Its name."""

    wheel: Wheel = field(default_factory=Wheel)

    def validate(self) -> None:
        if self.name == "spokeless" and self.wheel.spokes:
            raise ConfigError("a spokeless cart has spokes")


@dataclass(frozen=True)
class Barrow(Cart):
    name: str = "barrow"
    """A better name."""


def test_built_from_plain_data_with_defaults():
    cart = Cart.from_dict({"wheel": {"price": 2}})
    assert cart == Cart(wheel=Wheel(spokes=8, price=2.0))
    assert type(cart.wheel.price) is float


def test_plain_data_round_trip():
    cart = Cart(name="x", wheel=Wheel(spokes=3))
    assert Cart.from_dict(cart.to_dict()) == cart


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nam": "x"}, "unknown field nam; did you mean name?"),
        ({"wheel": {"spoke": 3}}, "unknown field wheel.spoke; did you mean spokes?"),
        ({"wheel": {"zzz": 3}}, "unknown field wheel.zzz; there are: spokes, price"),
        ({"wheel": {"spokes": -1}}, "wheel.spokes is -1, but must be a positive integer"),
        ({"wheel": None}, "wheel is None, but must be a section with the fields spokes, price"),
        ({"name": "spokeless"}, "a spokeless cart has spokes"),
    ],
)
def test_bad_data_is_named(data, message):
    with pytest.raises(ConfigError) as info:
        Cart.from_dict(data)
    assert str(info.value) == message


def test_plain_construction_is_checked_too():
    with pytest.raises(ConfigError, match=r"Wheel.spokes is 0, but must be a positive integer"):
        Wheel(spokes=0)
    with pytest.raises(ConfigError, match=r"Cart.wheel is 3, but must be a Wheel section"):
        Cart(wheel=3)
    with pytest.raises(ConfigError, match="spokeless"):
        replace(Cart(), name="spokeless")


def test_sections_do_not_change():
    with pytest.raises(FrozenInstanceError):
        Wheel().spokes = 3


def test_leaves_and_docs():
    assert [(leaf.path, leaf.doc) for leaf in config_fields(Cart)] == [
        ("name", "Its name."),
        ("wheel.spokes", "How many spokes."),
        ("wheel.price", "In euros."),
    ]
    assert field_docs(Barrow)["name"] == "A better name."


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_family_is_documented(family):
    undocumented = [leaf.path for leaf in config_fields(FAMILIES[family].config) if not leaf.doc]
    assert not undocumented
