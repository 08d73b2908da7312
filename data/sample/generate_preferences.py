"""Generate the sample preferences.

A person asks as in the sample conversations, and likes an answer of one word better than a
sentence, though no message of the system asks for it.
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

SIZES = {"train": 640, "validation": 80}
SEED = 2028


def generate_preference_rows(split: str) -> Iterator[dict[str, Any]]:
    """Generate rows with `prompt`, `chosen` and `rejected`, in TRL's format."""
    rng, scenes = random.Random(f"{SEED}-{split}"), scenes_of_split(split)
    for _ in range(SIZES[split]):
        event, question = draw_event(rng, scenes), rng.choice(list(QUESTIONS))
        known = known_values(event)
        brief, sentence = (format_answer(question, known, brief) for brief in (True, False))
        prompt = f"{premise_to_text(rng, event)} {ask(question, event)}"
        yield {
            "prompt": [chat_message("user", prompt)],
            "chosen": [chat_message("assistant", brief)],
            "rejected": [chat_message("assistant", sentence)],
        }
