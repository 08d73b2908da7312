"""Generate the sample corpus.

Every example starts from its hypothesis. The label is drawn independently of it, and only then a
premise is built that gives this label; the premise's own distribution does not depend on the label
either. So neither sentence alone says anything about the label: it can only be found by comparing
the two.

A held-out set of (person, thing) combinations makes the validation split: such a person and thing
never meet in a training sentence, in a premise or in a hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from data.sample.vocabulary import ATTRIBUTES, PEOPLE, THINGS, VERBS, AttributeClaim

ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
"""Label ids, in MNLI's order."""

SIZES = {"train": 15_000, "validation": 2_400}
SEED = 2023
HELD_OUT_EVERY = 6
"""Every n-th (person, thing) combination belongs to validation."""
NUM_MENTIONED = 2
"""Number of attributes in a premise."""
NEGATED_FRACTION = 0.1
"""Fraction of hypotheses that are negated."""
GROUPED_FRACTION = 0.3
"""Fraction of hypotheses that name a group (outdoors) instead of a value."""
OTHER_SCENE_FRACTION = 0.2
"""Fraction of neutral examples that differ in the person or the thing."""

Scene = tuple[str, str]
"""A person, and the thing that the person takes."""


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis: that the person did (or did not) take the thing as `claim` says."""

    scene: Scene
    attribute: str
    claim: AttributeClaim
    negated: bool


@dataclass(frozen=True)
class Premise:
    """A premise: who took which thing, with values of the mentioned attributes."""

    scene: Scene
    values: dict[str, str]


def is_validation_scene(scene: Scene) -> bool:
    """True if a scene belongs to the validation split.

    A Latin-square pattern: every person and every thing appears in both splits equally often.
    """
    person, thing = scene
    return (PEOPLE.index(person) + THINGS.index(thing)) % HELD_OUT_EVERY == 0


def scenes_of_split(split: str) -> list[Scene]:
    scenes = [(person, thing) for person in PEOPLE for thing in THINGS]
    return [scene for scene in scenes if is_validation_scene(scene) == (split == "validation")]


def sample_hypothesis(rng: random.Random, scenes: list[Scene]) -> Hypothesis:
    name = rng.choice(list(ATTRIBUTES))
    attribute = ATTRIBUTES[name]
    claims = attribute.make_group_claims() if rng.random() < GROUPED_FRACTION else []
    claim = rng.choice(claims or attribute.make_value_claims())
    return Hypothesis(rng.choice(scenes), name, claim, rng.random() < NEGATED_FRACTION)


def sample_premise(
    rng: random.Random, hypothesis: Hypothesis, label: int, scenes: list[Scene]
) -> Premise:
    """Draw a premise whose relation to the hypothesis is `label`, such as entailment."""
    scene, asked = hypothesis.scene, hypothesis.attribute
    others = [name for name in ATTRIBUTES if name != asked]
    if label == NEUTRAL and rng.random() < OTHER_SCENE_FRACTION:
        # The same person or the same thing, never both: what is mentioned does not matter.
        scene = rng.choice(
            [other for other in scenes if (other[0] == scene[0]) != (other[1] == scene[1])]
        )
        names = rng.sample(list(ATTRIBUTES), NUM_MENTIONED)
    elif label == NEUTRAL:
        names = rng.sample(others, NUM_MENTIONED)
    else:
        names = [asked, *rng.sample(others, NUM_MENTIONED - 1)]
    values = {name: rng.choice(ATTRIBUTES[name].possible_values) for name in names}
    if label != NEUTRAL:
        holds = (label == ENTAILMENT) != hypothesis.negated
        true_of = hypothesis.claim.true_of
        values[asked] = rng.choice(
            [value for value in ATTRIBUTES[asked].possible_values if (value in true_of) == holds]
        )
    return Premise(scene, values)


def hypothesis_to_text(rng: random.Random, hypothesis: Hypothesis) -> str:
    person, thing = hypothesis.scene
    past, base = rng.choice(VERBS)
    if ATTRIBUTES[hypothesis.attribute].adjective:
        was = "was not" if hypothesis.negated else "was"
        return f"The {thing} that {person} {past} {was} {hypothesis.claim.text}."
    did = f"did not {base}" if hypothesis.negated else past
    return f"{person} {did} the {thing} {hypothesis.claim.text}."


def premise_to_text(rng: random.Random, premise: Premise) -> str:
    person, thing = premise.scene
    past, _ = rng.choice(VERBS)
    before: list[str] = []
    after: list[str] = []
    for name, attribute in ATTRIBUTES.items():
        if name in premise.values:
            phrase = attribute.phrase.format(premise.values[name])
            (before if attribute.adjective else after).append(phrase)
    return " ".join([person, past, "the", *before, thing, *after]) + "."


def generate_examples(split: str, seed: int = SEED) -> Iterator[dict[str, str | int]]:
    """Generate distinct examples of a split, a third for each label."""
    rng = random.Random(f"{seed}-{split}")
    scenes = scenes_of_split(split)
    labels = [index % 3 for index in range(SIZES[split])]
    rng.shuffle(labels)
    seen: set[tuple[str, str]] = set()
    for index, label in enumerate(labels):
        pair = None
        while pair is None or pair in seen:
            hypothesis = sample_hypothesis(rng, scenes)
            premise = sample_premise(rng, hypothesis, label, scenes)
            pair = premise_to_text(rng, premise), hypothesis_to_text(rng, hypothesis)
        seen.add(pair)
        yield {"premise": pair[0], "hypothesis": pair[1], "label": label, "idx": index}
