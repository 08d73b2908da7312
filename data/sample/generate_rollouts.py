"""Generate the sample rollouts: `python -m data.sample.generate_rollouts`.

Four answers to each question, as a policy might write them. The reward is 1 for the right word, 0.5
for the right sentence and 0 for other answers.
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

SIZES = {"train": 160, "validation": 20}
"""Groups of four rows."""

COMPLETIONS = 4
SEED = 2029


def generate_rollout_rows(split: str) -> Iterator[dict[str, Any]]:
    """Generate rows with `prompt`, `completion`, `reward` and `group`."""
    rng, scenes = random.Random(f"{SEED}-{split}"), scenes_of_split(split)
    for group in range(SIZES[split]):
        scene = rng.choice(scenes)
        names = rng.sample(["colour", "place", "vehicle", "time"], NUM_TOLD_ATTRIBUTES)
        attributes = {name: rng.choice(ATTRIBUTES[name].possible_values) for name in names}
        question = rng.choice(list(QUESTIONS))
        asked = QUESTIONS[question].format(person=scene[0], thing=scene[1])
        prompt = f"{premise_to_text(rng, Premise(scene, attributes))} {asked}"
        known = {"who": scene[0], "what": scene[1]} | attributes
        other = format_answer(rng.choice([n for n in known if n != question]), known, True)
        brief, sentence = (format_answer(question, known, brief) for brief in (True, False))
        rewards = {brief: 1.0, sentence: 0.5, other: 0.0}
        for completion in rng.choices(list(rewards), k=COMPLETIONS):
            yield {
                "prompt": [chat_message("user", prompt)],
                "completion": [chat_message("assistant", completion)],
                "reward": rewards[completion],
                "group": group,
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "rollouts")
    write_splits(parser.parse_args().folder, generate_rollout_rows)
