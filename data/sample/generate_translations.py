"""Generate translated sentences.

They are English, with translations into German and French. A sentence says that a person does
something with a thing of some color. Each English sentence has a row for each language, so only the
row's languages say which translation is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

SIZES = {"train": 170, "validation": 30}
"""Number of English sentences of each split."""
SEED = 2026
ENGLISH, GERMAN, FRENCH = "eng_Latn", "deu_Latn", "fra_Latn"

PEOPLE = ("Anna", "Ben", "Leo", "Maria", "Sara")
VERBS = (
    ("sees", "sieht", "voit"),
    ("takes", "nimmt", "prend"),
    ("buys", "kauft", "achète"),
    ("sells", "verkauft", "vend"),
    ("finds", "findet", "trouve"),
    ("hides", "versteckt", "cache"),
)
COLORS = (
    ("red", "rot", ("rouge", "rouge")),
    ("green", "grün", ("vert", "verte")),
    ("blue", "blau", ("bleu", "bleue")),
    ("white", "weiß", ("blanc", "blanche")),
    ("black", "schwarz", ("noir", "noire")),
)
"""English, German without its ending, French masculine and feminine."""
ENDS = (
    ("in the garden", "im Garten", "dans le jardin"),
    ("in the kitchen", "in der Küche", "dans la cuisine"),
    ("in the morning", "am Morgen", "le matin"),
    ("at night", "in der Nacht", "la nuit"),
    ("in May", "im Mai", "en mai"),
)


class Thing(NamedTuple):
    """A noun in three languages, with its accusative article in German and its French article."""

    english: str
    german_article: str
    german: str
    french_article: str
    french: str


THINGS = (
    Thing("lamp", "die", "Lampe", "la", "lampe"),
    Thing("chair", "den", "Stuhl", "la", "chaise"),
    Thing("book", "das", "Buch", "le", "livre"),
    Thing("table", "den", "Tisch", "la", "table"),
    Thing("cup", "die", "Tasse", "la", "tasse"),
    Thing("key", "den", "Schlüssel", "la", "clé"),
    Thing("bag", "die", "Tasche", "le", "sac"),
    Thing("bike", "das", "Fahrrad", "le", "vélo"),
    Thing("hat", "den", "Hut", "le", "chapeau"),
    Thing("box", "die", "Kiste", "la", "boîte"),
)


class Sentence(NamedTuple):
    """A person, and the numbers of a verb, a color, a thing and an end."""

    person: str
    verb: int
    color: int
    thing: int
    end: int

    def translate(self) -> dict[str, str]:
        """Write the sentence in each language."""
        thing, (color, german_color, french_colors) = THINGS[self.thing], COLORS[self.color]
        verbs, ends = VERBS[self.verb], ENDS[self.end]
        german_color += "en" if thing.german_article == "den" else "e"
        french_color = french_colors[thing.french_article == "la"]
        objects = (
            f"the {color} {thing.english}",
            f"{thing.german_article} {german_color} {thing.german}",
            f"{thing.french_article} {thing.french} {french_color}",
        )
        texts = (
            f"{self.person} {verb} {object_} {end}."
            for verb, object_, end in zip(verbs, objects, ends, strict=True)
        )
        return dict(zip((ENGLISH, GERMAN, FRENCH), texts, strict=True))


def generate_translation_rows(split: str) -> Iterator[dict[str, str]]:
    """Generate rows with `source`, `target` and the languages of both."""
    sentences = [
        Sentence(person, *numbers)
        for person in PEOPLE
        for numbers in product(*(range(len(table)) for table in (VERBS, COLORS, THINGS, ENDS)))
    ]
    drawn = random.Random(SEED).sample(sentences, sum(SIZES.values()))
    start = 0 if split == "train" else SIZES["train"]
    for sentence in drawn[start : start + SIZES[split]]:
        texts = sentence.translate()
        for language in (GERMAN, FRENCH):
            yield {
                "source": texts[ENGLISH],
                "target": texts[language],
                "source_language": ENGLISH,
                "target_language": language,
            }
