"""Generate the sample conversations.

A user tells of one event and asks about it, several times; the assistant answers in a sentence, or
in one word if the system's message says so. What was not told, it does not know. People and things
of the validation split meet in no training conversation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from data.sample.generate import Premise, Scene, premise_to_text, scenes_of_split
from data.sample.vocabulary import ATTRIBUTES

SIZES = {"train": 2_000, "validation": 200}
SEED = 2027
BRIEF = "Answer in one word."
BRIEF_SHARE = 0.3
"""Fraction of conversations whose system message asks for one word."""
NUM_TOLD_ATTRIBUTES = 3
"""Number of attributes that the user mentions."""
NUM_QUESTIONS = (2, 4)
"""Minimum and maximum number of questions."""

QUESTIONS = {
    "who": "Who took the {thing}?",
    "what": "What did {person} take?",
    "colour": "What colour is it?",
    "place": "Where is it now?",
    "vehicle": "How did it get there?",
    "time": "When was that?",
}


def generate_conversation_rows(split: str) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Generate rows with a column `messages`, in OpenAI's format."""
    rng, scenes = random.Random(f"{SEED}-{split}"), scenes_of_split(split)
    for _ in range(SIZES[split]):
        event = draw_event(rng, scenes)
        known = known_values(event)
        brief = rng.random() < BRIEF_SHARE
        messages = [chat_message("system", BRIEF)] if brief else []
        text = premise_to_text(rng, event) + " "
        for question in rng.sample(list(QUESTIONS), rng.randint(*NUM_QUESTIONS)):
            messages.append(chat_message("user", text + ask(question, event)))
            messages.append(chat_message("assistant", format_answer(question, known, brief)))
            text = ""
        yield {"messages": messages}


def draw_event(rng: random.Random, scenes: Sequence[Scene]) -> Premise:
    """Draw what the user tells: a scene with some of its attributes."""
    scene = rng.choice(scenes)
    names = rng.sample(["colour", "place", "vehicle", "time"], NUM_TOLD_ATTRIBUTES)
    return Premise(scene, {name: rng.choice(ATTRIBUTES[name].possible_values) for name in names})


def known_values(event: Premise) -> dict[str, str]:
    """Values of an event by what `QUESTIONS` ask for."""
    return {"who": event.scene[0], "what": event.scene[1]} | event.values


def ask(question: str, event: Premise) -> str:
    """Write one of `QUESTIONS` about an event."""
    person, thing = event.scene
    return QUESTIONS[question].format(person=person, thing=thing)


def format_answer(question: str, known_values: dict[str, str], one_word: bool) -> str:
    """The assistant's answer to a question, as one word or a sentence."""
    value = known_values.get(question)
    if value is None:
        return "unknown" if one_word else "You did not say."
    if one_word:
        return value.split()[-1]
    match question:
        case "who":
            return f"{value} did."
        case "what":
            return f"The {value}."
        case "colour":
            return f"It is {value}."
        case "place":
            return f"In the {value}."
        case "vehicle":
            return f"By {value}."
        case _:
            return f"{value.capitalize()}."


def chat_message(role: str, content: str) -> dict[str, str]:
    """Create a message with a role and content."""
    return {"role": role, "content": content}
