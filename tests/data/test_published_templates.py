"""What is learned under templates as they are published, against TRL's twins of them, which mark
what an assistant writes, and against prefixes that transformers renders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from data.assistant_spans import ConversationError
from data.chat_template import ChatTemplate
from data.conversations import Conversation
from data.tokenizer import Tokenizer
from tests.data.published_templates import (
    CONVERSATIONS,
    NAMES,
    TWINS,
    conversation,
    published_tokenizer,
    source_of,
)

# ---- where TRL learns more, or something else ---------------------------------------------------
ASKED = {
    "qwen2_5": ("\n",),
    "qwen3_5_nothink": ("<think>\n\n</think>\n\n", "<think>\n"),
    "qwen3_5_think": ("<think>\n",), "qwen3_6": ("<think>\n",), "qwen3_8": ("<think>\n",),
    "deepseek": ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
    "gptoss": ("<|start|>assistant",), "muse_glimmer": ("<|start|>assistant",),
    "nemotron": ("<think>\n", "<think>"),
}  # fmt: skip
"""What twins mark at the beginning of an answer although the template asks with it."""

AFTER_END = re.compile(r"(?:\s|<\|endoftext\|>|(?<=<\|END_RESPONSE\|>)<\|END_OF_TURN_TOKEN\|>)*$")
"""What twins mark after the token that ends an answer: nobody generates so far."""

THOUGHTS = re.compile(r"^.*?</think>\s*", re.DOTALL)

ROUNDS = ("turns", "questions", "thoughts twice", "inline twice", "tools, then a question",
          "thoughts of calls")  # fmt: skip
CALLS = ("call", "null call", "empty call", "tools", "tools, then a question", "thoughts of calls")
EARLIER = "the twin writes thoughts before every answer, the template not before all"
AS_TEXT = "the template knows no calls, which become text; the twin leaves them out"
NO_END = "the template ends an answer with nothing, the twin with the next role"
DROPPED = "the template leaves out all before </think>, which is said; the twin writes it"
JOINED = "the twin's marks touch: what asks for the second answer is learned, too"
HEADER = "the twin does not mark what calls end with"
ALTERNATING = ("cohere", "cohere2", "gemma", "gemma3")
"""Templates that refuse messages of tools."""

REASONS: dict[tuple[str, str], str] = {
    **{("qwen3", name): EARLIER for name in (*ROUNDS, "tools")},
    **{
        (name, talk): EARLIER
        for name in ("qwen3_5_think", "qwen3_6")
        for talk in ROUNDS
    },
    **{
        ("qwen3_5_nothink", talk): EARLIER
        for talk in ("thoughts twice", "inline twice", "thoughts of calls")
    },
    **{
        (name, talk): AS_TEXT
        for name in ("cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5")
        for talk in (CALLS[:3] if name in ALTERNATING else CALLS)
    },
    **{("glm4moe", talk): NO_END for talk in CONVERSATIONS},
    **{("deepseek_r1_distill", talk): DROPPED for talk in ("inline", "inline twice")},
    **{
        (name, "two answers"): JOINED
        for name in ("deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gptoss",
                     "muse_glimmer", "qwen3")
    },
    **{("diffusion_gemma", talk): HEADER for talk in CALLS},
}  # fmt: skip


def as_read(name: str, talk: Conversation) -> list[dict[str, Any]]:
    """The messages in the form that DeepSeek's twins read: null for no text, arguments as text."""
    messages = [dict(message) for message in talk.messages]
    for one in messages if name.startswith("deepseek") else ():
        if "tool_calls" in one:
            one["content"] = one.get("content") or None
        if "tool_calls" in one and name == "deepseek_r1_distill":
            function = one["tool_calls"][0]["function"]
            written = {**function, "arguments": json.dumps(function["arguments"])}
            one["tool_calls"] = [{**one["tool_calls"][0], "function": written}]
    return messages


def runs(base: Any, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The texts of tokens that follow each other under the mask."""
    found, last = list[list[int]](), 0
    for token, here in zip(ids, mask, strict=True):
        if here and not last:
            found.append([])
        if here:
            found[-1].append(token)
        last = here
    return [base.decode(tokens) for tokens in found]


def marked_by_transformers(name: str, template: str, talk: Conversation) -> list[str] | None:
    """What blocks of a template mark; None: it refuses the conversation."""
    base = published_tokenizer(name)
    try:
        (text,), (blocks,) = render_jinja_template(
            conversations=[as_read(name, talk)], tools=talk.tools, chat_template=template,
            return_assistant_tokens_mask=True, **base.special_tokens_map,
        )  # fmt: skip
    except Exception:  # whatever templates raise
        return None
    encoding = base(text, add_special_tokens=False)
    mask = np.zeros(len(encoding["input_ids"]), bool)
    for start, end in blocks:  # as apply_chat_template, which drops messages' nulls
        if end > start:
            mask[encoding.char_to_token(start) : encoding.char_to_token(end - 1) + 1] = True
    return runs(base, encoding["input_ids"], mask.tolist())


def learned(name: str, talk: Conversation, template: str | None = None) -> list[str] | None:
    """What we learn; None: it is left out."""
    base = published_tokenizer(name)
    base.chat_template = template or base.chat_template
    try:
        example = ChatTemplate(base).make_example(talk)
    except ConversationError:
        return None
    (tokens,) = Tokenizer(base, chat=True).encode_with_loss_mask([example.text_spans()])
    text = "".join(span.text for span in example.rendered_spans)
    assert tokens.ids.tolist() == base(text, add_special_tokens=False)["input_ids"]
    return runs(base, tokens.ids.tolist(), tokens.loss_mask.tolist())


def without_more(name: str, answers: list[str] | None) -> list[str] | None:
    """What a twin marks, without `ASKED` and `AFTER_END`."""
    if answers is None:
        return None
    asked = next((asked for start, asked in ASKED.items() if name.startswith(start)), ())
    found = list[str]()
    for answer in answers:
        begun = next((one for one in asked if answer.startswith(one)), "")
        found.append(AFTER_END.sub("", answer.removeprefix(begun)))
    return [answer for answer in found if answer]


@pytest.mark.parametrize("name", TWINS)
def test_what_is_learned_is_what_trls_twins_mark(name):
    for title in CONVERSATIONS:
        talk = conversation(title)
        marked = marked_by_transformers(name, source_of(f"{name}_training"), talk)
        expected, found = without_more(name, marked), learned(name, talk)
        reason = REASONS.get((name, title))
        assert (found == expected) == (reason is None), (title, reason, found, expected)
        if reason == EARLIER:
            assert found is not None
            assert expected is not None
            assert [THOUGHTS.sub("", answer) for answer in found] == [
                THOUGHTS.sub("", answer) for answer in expected
            ]


@pytest.mark.parametrize("name", TWINS)
def test_what_a_twin_marks_is_learned_as_transformers_has_it(name):
    template = source_of(f"{name}_training")
    for title in CONVERSATIONS:
        talk = conversation(title)
        expected = marked_by_transformers(name, template, talk)
        if expected is not None and not (title in CALLS and "tool_calls" not in template):
            assert learned(name, talk, template) == expected, title


def by_prefixes(name: str, talk: Conversation) -> list[str] | None:
    """What each answer adds to the text that asks for it, in texts of transformers; None: one of
    them is refused, or stands in the whole text in another way."""
    base = published_tokenizer(name)

    def text(count: int, asks: bool) -> str:
        return str(
            base.apply_chat_template(
                list(talk.messages[:count]), tools=talk.tools, tokenize=False,
                add_generation_prompt=asks,
            )
        )  # fmt: skip

    found = list[str]()
    try:
        whole = text(len(talk.messages), False)
        for index, message in enumerate(talk.messages):
            if message["role"] == "assistant":
                before, after = text(index, True), text(index + 1, False)
                if not after.startswith(before) or not whole.startswith(after):
                    return None
                found.append(AFTER_END.sub("", after.removeprefix(before)))
    except Exception:  # whatever templates raise
        return None
    return found


COMPARED = {name: 12 for name in NAMES if name not in TWINS} | {"gemma4_v5": 9, "lfm2_2_5": 10,
                                                                "lfm2_2_5_v2": 10}  # fmt: skip
"""Conversations of which prefixes show the answers, at least."""


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_learned_without_a_twin_is_what_answers_add(name):
    compared = 0
    for title in CONVERSATIONS:
        expected = by_prefixes(name, conversation(title))
        if expected is not None:
            found = learned(name, conversation(title))
            assert without_more(name, found) == expected, title
            compared += 1
    assert compared >= COMPARED[name], compared
