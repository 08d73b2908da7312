"""Generate the sample preferences: `python -m data.sample.generate_preferences`.

A person asks as in the sample conversations, and likes an answer of one word better than a
sentence, though no message of the system asks for it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.sample.generate import Premise, premise_to_text, scenes_of_split
from data.sample.generate_conversations import (
    NUM_TOLD_ATTRIBUTES,
    QUESTIONS,
    chat_message,
    format_answer,
    write_splits,
)
from data.sample.vocabulary import ATTRIBUTES

SIZES = {"train": 640, "validation": 80}
SEED = 2028


def generate_preference_rows(split: str) -> Iterator[dict[str, Any]]:
    """Generate rows with `prompt`, `chosen` and `rejected`, in TRL's format."""
    rng, scenes = random.Random(f"{SEED}-{split}"), scenes_of_split(split)
    for _ in range(SIZES[split]):
        scene = rng.choice(scenes)
        names = rng.sample(["colour", "place", "vehicle", "time"], NUM_TOLD_ATTRIBUTES)
        attributes = {name: rng.choice(ATTRIBUTES[name].possible_values) for name in names}
        question = rng.choice(list(QUESTIONS))
        asked = QUESTIONS[question].format(person=scene[0], thing=scene[1])
        known = {"who": scene[0], "what": scene[1]} | attributes
        brief, sentence = (format_answer(question, known, brief) for brief in (True, False))
        yield {
            "prompt": [
                chat_message("user", f"{premise_to_text(rng, Premise(scene, attributes))} {asked}")
            ],
            "chosen": [chat_message("assistant", brief)],
            "rejected": [chat_message("assistant", sentence)],
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "preferences")
    write_splits(parser.parse_args().folder, generate_preference_rows)
