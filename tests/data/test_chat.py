"""Chat templates: texts, tokens and what is learned of them, against transformers."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from data.chat import ChatTemplate, Refused, chat_template_of
from data.conversations import Conversation
from data.texts import Example
from data.tokens import Tokenizer
from tests.data.chat_templates import DATED, ENDS, TEMPLATES, chat_tokenizer, marked, plain

# ---- random conversations -----------------------------------------------------------------------
WORDS = (
    *("Anna", "took", " the", "lamp", "\n", "\n\n", " ", "\t", "☃", "naïve", "👩‍🚀", "", "<b>", ":"),
    *("<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "[INST]", "{{ x }}", "42"),
)
CALL = {"name": "find", "arguments": {"what": "lamp ☃"}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(6)))


def message(rng: random.Random, role: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": role, "content": text(rng)}
    if role == "assistant" and rng.random() < 0.2:
        found["reasoning_content"] = text(rng)
    if role == "assistant" and rng.random() < 0.2:
        found["tool_calls"] = [{"type": "function", "function": CALL}] * rng.randrange(1, 3)
        if rng.random() < 0.5:
            del found["content"]
    return found


def conversation(rng: random.Random) -> Conversation:
    """Mostly well-formed; some have roles in any order, none of an assistant, or tools."""
    roles = ["system"] * (rng.random() < 0.3) + ["user", "assistant"] * rng.randrange(1, 4)
    if rng.random() < 0.3:
        roles = rng.choices(("system", "user", "assistant", "tool"), k=rng.randrange(1, 6))
    if rng.random() < 0.2:
        roles.append("user")
    tools = TOOLS if rng.random() < 0.2 else None
    return Conversation([message(rng, role) for role in roles], tools)


def of_transformers(
    template: str, conversation: Conversation, variables: dict[str, Any]
) -> tuple[list[int], list[int]] | None:
    """Tokens, and the mask of the assistant's, of transformers; None: the template raises."""
    base = chat_tokenizer(marked(template))
    try:
        found = base.apply_chat_template(
            list(conversation.messages),
            tools=conversation.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **variables,
        )
    except Exception:  # whatever templates raise
        return None
    return found["input_ids"], found["assistant_masks"]


def ours(base: Any, example: Example) -> tuple[list[int], list[int]]:
    (found,) = Tokenizer(base, chat=True).marked([example.spans()])
    return found.ids.tolist(), found.learned.astype(int).tolist()


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "no thoughts"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", [plain, marked])
def test_tokens_and_masks_are_those_of_transformers(form, name, variables):
    """With prefixes, which transformers has not, they are those of the template with blocks."""
    rng, template = random.Random(f"{name}{variables}"), TEMPLATES[name]
    base = chat_tokenizer(form(template))
    chat = ChatTemplate(base, variables)
    checked = refused = 0
    for _ in range(150):
        drawn = conversation(rng)
        if name != "tools" and any("tool_calls" in m for m in drawn.messages):
            continue  # these become text
        expected = of_transformers(template, drawn, variables)
        try:
            found = ours(base, chat.example(drawn))
        except Refused as error:
            refused += 1
            no_answer = expected is not None and not any(expected[1])
            assert expected is None or no_answer or is_lost(error), (drawn, error)
            continue
        assert found == expected, drawn
        checked += 1
    assert checked > 40, (checked, refused)
    assert chat.doubted == []
    print(checked, refused)


def is_lost(error: Refused) -> bool:
    """Whether prefixes cannot tell where an answer is: allowed, but said."""
    return "try --data.loss last" in str(error) or "refuses it" in str(error)
