"""Generate a summarization and a classification task.

`summaries/` is free text: sentences about two events, and who took what. `places/` is labelled:
whether what a sentence tells happens indoors or outdoors. Words and sentences are those of the
sample corpus, so that its tokenizers know them. People and things of the validation split meet in
no training example.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path

from data.sample.generate import Premise, Scene, premise_to_text, scenes_of_split
from data.sample.vocabulary import ATTRIBUTES

SIZES = {"train": 1_200, "validation": 120}
SEED = 2026
PLACE = "place"


def generate_summary_rows(split: str) -> Iterator[dict[str, str]]:
    """Generate rows with `text` (two sentences) and `summary` (without the details)."""
    rng, scenes = random.Random(f"{SEED}-summaries-{split}"), scenes_of_split(split)
    for _ in range(SIZES[split]):
        first, second = _draw_two_scenes(rng, scenes)
        text = " ".join(_write_event_sentence(rng, scene, rng.sample(list(ATTRIBUTES), 2))
                        for scene in (first, second))  # fmt: skip
        yield {
            "text": text,
            "summary": f"{_write_event_clause(first)} and {_write_event_clause(second)}.",
        }


def generate_place_rows(split: str) -> Iterator[dict[str, str]]:
    """Generate rows with `sentence` and `where` (indoors or outdoors), equally often."""
    rng, scenes = random.Random(f"{SEED}-places-{split}"), scenes_of_split(split)
    others = [name for name in ATTRIBUTES if name != PLACE]
    for index in range(SIZES[split]):
        where = ("indoors", "outdoors")[index % 2]
        value = rng.choice(ATTRIBUTES[PLACE].groups[where])
        attribute_names = {PLACE: value} | {
            name: _draw_attribute_value(rng, name) for name in rng.sample(others, 1)
        }
        yield {
            "sentence": premise_to_text(rng, Premise(rng.choice(scenes), attribute_names)),
            "where": where,
        }


def _draw_two_scenes(rng: random.Random, scenes: list[Scene]) -> tuple[Scene, Scene]:
    first = rng.choice(scenes)
    return first, rng.choice([s for s in scenes if s[0] != first[0] and s[1] != first[1]])


def _write_event_sentence(rng: random.Random, scene: Scene, attribute_names: list[str]) -> str:
    return premise_to_text(
        rng, Premise(scene, {name: _draw_attribute_value(rng, name) for name in attribute_names})
    )


def _draw_attribute_value(rng: random.Random, name: str) -> str:
    return rng.choice(ATTRIBUTES[name].possible_values)


def _write_event_clause(scene: Scene) -> str:
    person, thing = scene
    return f"{person} took the {thing}"


def write_places(folder: Path) -> None:
    """Write `train.csv` and `validation.csv` of the classification task."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ("sentence", "where"), lineterminator="\n")
            writer.writeheader()
            writer.writerows(generate_place_rows(split))
