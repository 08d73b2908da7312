"""Generate the sample of contrastive rows.

A question mentions two attributes of an event, the positive describes the event with one more, and
the negative with another value of one that was asked for. `corpus.jsonl` has other events.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from data.sample.generate import Premise, premise_to_text, scenes_of_split
from data.sample.vocabulary import ATTRIBUTES

SIZES = {"train": 512, "validation": 64, "corpus": 128}
SEED = 2029
NUM_TOLD_ATTRIBUTES = 3


def generate_retrieval_rows(split: str) -> Iterator[dict[str, str]]:
    """Generate rows with `anchor`, `positive` and `negative`; of the corpus, events as `text`."""
    rng = random.Random(f"{SEED}-{split}")
    if split == "corpus":
        for _ in range(SIZES[split]):
            yield {"text": premise_to_text(rng, _draw_event(rng, "validation"))}
        return
    for _ in range(SIZES[split]):
        event = _draw_event(rng, "train" if split == "train" else "validation")
        changed, other, _ = rng.sample(list(event.values), NUM_TOLD_ATTRIBUTES)
        asked = {name: event.values[name] for name in (changed, other)}
        values = [v for v in ATTRIBUTES[changed].possible_values if v != event.values[changed]]
        wrong = Premise(event.scene, {**event.values, changed: rng.choice(values)})
        question = premise_to_text(rng, Premise(event.scene, asked)).rstrip(".")
        yield {
            "anchor": f"Is it known that {question}?",
            "positive": premise_to_text(rng, event),
            "negative": premise_to_text(rng, wrong),
        }


def _draw_event(rng: random.Random, split: str) -> Premise:
    names = rng.sample(list(ATTRIBUTES), NUM_TOLD_ATTRIBUTES)
    attributes = {name: rng.choice(ATTRIBUTES[name].possible_values) for name in names}
    return Premise(rng.choice(scenes_of_split(split)), attributes)
