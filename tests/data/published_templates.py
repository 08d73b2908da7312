"""Chat templates as models are published with them, from TRL's files, and conversations."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import trl
from transformers import PreTrainedTokenizerFast

from data.conversations import Conversation, read_conversation
from tests.data.chat_templates import chat_tokenizer

FOLDER = Path(trl.__file__).parent / "chat_templates"
_IMAGES = re.compile("vl|idefics|llava|smolvlm")
NAMES = sorted(
    path.stem
    for path in FOLDER.glob("*.jinja")
    if not path.stem.endswith("_training") and not _IMAGES.search(path.stem)
)
TWINS = [name for name in NAMES if (FOLDER / f"{name}_training.jinja").exists()]
"""Those of which a twin marks what an assistant writes."""

_SPECIAL = re.compile(
    r"<[|｜][\w▁]+[|｜]>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>|<\|?channel\|?>"
)
ENDS = {"deepseek": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>", "llama": "<|eot_id|>"}


def source_of(name: str, day: str = "2026-01-01") -> str:
    """A template, which writes this day."""
    text = (FOLDER / f"{name}.jinja").read_text("utf-8")
    return text.replace('strftime_now("%Y-%m-%d")', repr(day))


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    source = source_of(name)
    base = chat_tokenizer(source)
    base.add_tokens(sorted(set(_SPECIAL.findall(source))), special_tokens=True)
    end = next((end for start, end in ENDS.items() if name.startswith(start)), None)
    if end is not None:
        base.add_special_tokens({"eos_token": end})
    return base


def published_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with a template and the special tokens that it writes."""
    return deepcopy(_tokenizer(name))


# ---- conversations ------------------------------------------------------------------------------
CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "lamp"}}}
WHAT = {"what": {"type": "string", "description": "What is lost."}}
PARAMETERS = {"type": "object", "properties": WHAT, "required": ["what"]}
FIND = {"name": "find", "description": "Finds it.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FIND}
THOUGHT = "Let me think."


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def inline(thought: str, text: str) -> dict[str, Any]:
    return message("assistant", f"<think>\n{thought}\n</think>\n\n{text}")


ASKS, ANNA = message("user", "Who took it?"), message("assistant", "Anna did.")
WHERE, THERE = message("user", "Where?"), message("assistant", "In the garden.")
BRIEF = message("system", "Be brief.")
CALLS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = message("tool", "It is Anna's.", name="find")

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [ASKS, ANNA],
    "system": [BRIEF, ASKS, ANNA],
    "turns": [BRIEF, ASKS, ANNA, WHERE, THERE, message("user", "Why?"), message("assistant", "x")],
    "questions": [ASKS, ANNA, WHERE, THERE],
    "spaces": [message("user", " Who? "), message("assistant", "  Anna.\n")],
    "letters": [message("user", "Naïve ☃?"), message("assistant", "👩‍🚀 {{ x }}")],
    "thoughts": [ASKS, {**ANNA, "reasoning_content": THOUGHT}],
    "thoughts twice": [ASKS, {**ANNA, "reasoning_content": THOUGHT},
                       WHERE, {**THERE, "reasoning_content": "Hm."}],
    "inline": [ASKS, inline(THOUGHT, "Anna did.")],
    "inline twice": [ASKS, inline(THOUGHT, "Anna did."), WHERE, inline("Hm.", "In the garden.")],
    "call": [ASKS, CALLS],
    "null call": [ASKS, message("assistant", None, tool_calls=[CALL])],
    "empty call": [ASKS, message("assistant", "", tool_calls=[CALL])],
    "tools": [BRIEF, ASKS, CALLS, RESULT, ANNA],
    "tools, then a question": [ASKS, CALLS, RESULT, ANNA, WHERE, THERE],
    "thoughts of calls": [ASKS, {**CALLS, "reasoning_content": THOUGHT}, RESULT,
                          {**ANNA, "reasoning_content": "So."}, WHERE, THERE],
    "developer": [message("developer", "Be brief."), ASKS, ANNA],
    "two answers": [ASKS, ANNA, THERE],
}  # fmt: skip


def conversation(name: str) -> Conversation:
    messages = CONVERSATIONS[name]
    uses = any("tool_calls" in one for one in messages)
    return read_conversation({"messages": messages, "tools": [TOOL] if uses else None})
