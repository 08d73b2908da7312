"""Generate the sample rollouts.

Four answers to each question, as a policy might write them. The reward is 1 for the right word, 0.5
for the right sentence and 0 for other answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from data.sample.generate import premise_to_text, scenes_of_split
from data.sample.generate_conversations import (
    QUESTIONS,
    ask,
    chat_message,
    draw_event,
    format_answer,
    known_values,
)

SIZES = {"train": 160, "validation": 20}
"""Groups of four rows."""

COMPLETIONS = 4
SEED = 2029


def generate_rollout_rows(split: str) -> Iterator[dict[str, Any]]:
    """Generate rows with `prompt`, `completion`, `reward` and `group`."""
    rng, scenes = random.Random(f"{SEED}-{split}"), scenes_of_split(split)
    for group in range(SIZES[split]):
        event, question = draw_event(rng, scenes), rng.choice(list(QUESTIONS))
        prompt = f"{premise_to_text(rng, event)} {ask(question, event)}"
        known = known_values(event)
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
