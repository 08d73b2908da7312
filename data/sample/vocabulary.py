"""Vocabulary of the sample corpus: people, things, verbs and attributes of events.

A scene is one event: a person takes a thing somewhere. It has eight attributes. The values of an
attribute exclude one another (the thing is clean or dirty), and some attributes have groups of
values with a common name (a garden and a beach are outdoors).
"""

from __future__ import annotations

from dataclasses import dataclass

PEOPLE = (
    "Adam Alice Anna Ben Carl Clara David Emma Eric Eva Felix Grace "
    "Hugo Ida Jack Julia Karl Laura Leo Maria Nina Oscar Paul Sara"
).split()

THINGS = (
    "bag ball basket blanket book bottle box carpet chair clock coat cup "
    "desk drum flag guitar hat kite ladder lamp mirror painting tent vase"
).split()

VERBS = (("took", "take"), ("carried", "carry"), ("brought", "bring"), ("moved", "move"))
"""Past and base forms of synonymous verbs."""


@dataclass(frozen=True)
class AttributeClaim:
    """A statement about an attribute, and the attribute's values for which it is true."""

    text: str
    true_of: frozenset[str]


@dataclass(frozen=True)
class EventAttribute:
    """One attribute of an event, such as its place, with its possible values.

    `phrase` turns a value into words (`to the {}`). `groups` maps the words of each group
    (`outdoors`) to its values; the groups of one attribute have the same size, so that a uniformly
    drawn group gives a uniformly drawn value. An attribute without names for groups has the single
    group "". An adjective stands before the thing, other phrases end the sentence.
    """

    phrase: str
    groups: dict[str, tuple[str, ...]]
    adjective: bool = False

    @property
    def possible_values(self) -> tuple[str, ...]:
        return tuple(value for group in self.groups.values() for value in group)

    def make_value_claims(self) -> list[AttributeClaim]:
        return [
            AttributeClaim(self.phrase.format(value), frozenset([value]))
            for value in self.possible_values
        ]

    def make_group_claims(self) -> list[AttributeClaim]:
        return [
            AttributeClaim(name, frozenset(group)) for name, group in self.groups.items() if name
        ]


ATTRIBUTES = {
    "size": EventAttribute("{}", {"": ("small", "large")}, adjective=True),
    "state": EventAttribute("{}", {"": ("clean", "dirty")}, adjective=True),
    "colour": EventAttribute("{}", {"": ("red", "green", "blue")}, adjective=True),
    "place": EventAttribute(
        "to the {}", {"indoors": ("kitchen", "office"), "outdoors": ("garden", "beach")}
    ),
    "vehicle": EventAttribute(
        "by {}", {"by road": ("bus", "truck"), "by water": ("boat", "ferry")}
    ),
    "company": EventAttribute("{}", {"": ("alone", "with a friend")}),
    "time": EventAttribute("{}", {"": ("in the morning", "at noon", "at night")}),
    "manner": EventAttribute("{}", {"": ("slowly", "quickly")}),
}
"""Attributes in the order in which a premise mentions them."""
