"""Chat templates: texts, tokens and what is learned of them, against transformers."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from config.llama import LlamaConfig
from config.presets import load_config
from config.t5 import T5Config
from data import template_sandbox
from data.causal_lm import CAUSAL_LM
from data.chat_template import ChatTemplate, ConversationError, load_chat_template
from data.conversations import Conversation, read_conversation
from data.examples import Example
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from data.sources import DataError
from data.tokenizer import Tokenizer
from files.file_location import FileLocation
from tests.data.chat_templates import DATED, ENDS, TEMPLATES, chat_tokenizer, marked, plain
from tests.data.corpora import encode
from tests.small_runs import vocabulary

# ---- random conversations -----------------------------------------------------------------------
WORDS = (
    *(
        "Anna",
        "took",
        " the",
        "lamp",
        "\n",
        "\n\n",
        " ",
        "\t",
        "☃",
        "naïve",
        "👩‍🚀",
        "",
        "<b>",
        ":",
    ),
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
    (found,) = Tokenizer(base, chat=True).encode_with_loss_mask([example.text_spans()])
    return found.ids.tolist(), found.loss_mask.astype(int).tolist()


def compare(form: Any, name: str, variables: dict[str, Any], draws: int, seed: int = 0) -> None:
    rng, template = random.Random(f"{name}{variables}{seed}"), TEMPLATES[name]
    base = chat_tokenizer(form(template))
    chat = ChatTemplate(base, variables)
    checked = lost = 0
    for _ in range(draws):
        drawn = conversation(rng)
        if name != "tools" and any("tool_calls" in m for m in drawn.messages):
            continue  # these become text
        if name == "thinking" and any("<think>" in m.get("content", "") for m in drawn.messages):
            continue  # it asks with the same characters
        expected = of_transformers(template, drawn, variables)
        try:
            found = ours(base, chat.make_example(drawn))
        except ConversationError as error:
            if expected is not None and any(expected[1]):
                assert is_lost(error), (drawn, error)  # noqa: PT017
                lost += 1
            continue
        assert found == expected, drawn
        checked += 1
    assert checked > draws / 6
    assert lost < checked / 10
    assert chat.template_warnings == []


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        *((name, {}) for name in TEMPLATES),
        *(
            pytest.param(
                name,
                {"enable_thinking": False},
                id=f"{name}-no thoughts",
                marks=() if "enable_thinking" in template else pytest.mark.slow,
            )
            for name, template in TEMPLATES.items()
        ),
    ],
)
@pytest.mark.parametrize("form", [plain, marked])
def test_tokens_and_masks_are_those_of_transformers(form, name, variables):
    """With prefixes, which transformers has not, they are those of the template with blocks."""
    compare(form, name, variables, draws=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", [plain, marked])
def test_tokens_and_masks_of_many_conversations(form, name):
    compare(form, name, {}, draws=2000, seed=1)


def is_lost(error: ConversationError) -> bool:
    """Whether prefixes cannot tell where an answer is: allowed, but said."""
    return "try --data.loss_on last_turn" in str(error) or "refuses it" in str(error)


# ---- what is learned ----------------------------------------------------------------------------
def talk(*texts: str, **more: Any) -> Conversation:
    """A user and the assistant by turns; `more`: for the first answer."""
    roles = ["user", "assistant"] * len(texts)
    found = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    found[1] |= more
    return Conversation(found)


def learned(chat: ChatTemplate, conversation: Conversation) -> list[str]:
    return [span.text for span in chat.make_example(conversation).rendered_spans if span.in_loss]


def test_the_loss_is_on_the_answers_on_the_last_or_on_weighted_ones():
    base, two = chat_tokenizer(plain(TEMPLATES["chatml"])), talk("a", "b", "c", "d")
    assert learned(ChatTemplate(base), two) == ["b<|im_end|>", "d<|im_end|>"]
    assert learned(ChatTemplate(base, loss="last_turn"), two) == ["d<|im_end|>"]
    assert learned(ChatTemplate(base), talk("a", "b", "c", "d", weight=0)) == ["d<|im_end|>"]
    for nothing, why in (
        (talk("a", "b", weight=0), "none of its tokens"),
        (talk("a", "b").without_last_answer(), "no"),
    ):
        with pytest.raises(ConversationError, match=why):
            ChatTemplate(base).make_example(nothing)


TOOLS_LATE = (
    "{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if m is sameas last %}[TOOLS]{%- endif %}"
    "{{- '[INST]' + m.content + '[/INST]' }}{%- else %}{{- m.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
"""Writes tools before the last question, as Mistral's does."""


def test_the_last_answer_is_found_where_earlier_ones_cannot_be():
    base, two = chat_tokenizer(TOOLS_LATE), talk("a", "b", "c", "d")
    with pytest.raises(ConversationError, match="differently .*: try --data.loss_on last_turn"):
        ChatTemplate(base).make_example(two)
    assert learned(ChatTemplate(base, loss="last_turn"), two) == ["d<|endoftext|>"]


def test_the_prompt_asks_and_the_target_is_what_people_see():
    chat = ChatTemplate(chat_tokenizer(plain(TEMPLATES["qwen3"])))
    example = chat.make_example(talk("a", "b", "c", "d"))
    assert example.prompt.endswith("c<|im_end|>\n<|im_start|>assistant\n")
    assert example.prompt == chat.render_prompt(talk("a", "b", "c", "d").without_last_answer())
    assert example.target == "<think>\n\n</think>\n\nd"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_that_ends_an_answer_is_found(name):
    chat = ChatTemplate(chat_tokenizer(plain(TEMPLATES[name])))
    assert chat.stop_token == ENDS.get(name, "<|im_end|>")
    assert chat.stop_token_id == chat.hf_tokenizer.convert_tokens_to_ids(chat.stop_token)


@pytest.mark.parametrize(
    ("after", "doubted"),
    [
        ("⟦{{- (message.content or '') + '<|im_end|>\n' }}⟧", 0),  # as SmolLM3's
        ("⟦{{- message.content or '' }}⟧{{- '<|im_end|>' }}", 1),  # nobody would learn to stop
    ],
)
def test_blocks_that_mark_something_else_than_what_answers_add_are_named(after, doubted):
    inner = "⟦{{- (message.content or '') + '<|im_end|>' }}⟧"
    chat = ChatTemplate(chat_tokenizer(marked(TEMPLATES["chatml"].replace(inner, after))))
    assert chat.example_or_none("rows, line 7", talk("a", "b"))
    assert len(chat.template_warnings) == doubted
    if doubted:
        (note,) = chat.warning_lines()
        assert "in 1 conversations: rows, line 7: 'b' marked, 'b<|im_end|>' added" in note


def test_the_day_is_the_same_tomorrow_where_runs_are_trained():
    base = chat_tokenizer(plain(DATED))
    example = ChatTemplate(base).make_example(talk("a", "b"))
    assert "Today: 01 Jan 2026\n<|start_header_id|>user" in example.prompt
    (message,) = talk("a", "b").without_last_answer().messages
    theirs = base.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(base, fix_date=False).render_prompt(Conversation([message])) == theirs


def test_tool_calls_become_text_for_templates_that_would_pass_over_them():
    called = [{"type": "function", "function": CALL}]
    chat = ChatTemplate(chat_tokenizer(plain(TEMPLATES["chatml"])))
    both = [*talk("a", "b").messages, *talk("c", "d", tool_calls=called).messages]
    example = chat.make_example(Conversation(both, TOOLS))
    call = '{"name": "find", "arguments": {"what": "lamp ☃"}}'
    assert example.rendered_spans[-2].text == f"d\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    assert "writes no tools" in " ".join(chat.warning_lines())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: give one with --data.chat_template FILE"),
        ("{% for %}", "not one that Jinja can read: line 1"),
    ],
)
def test_tokenizers_without_a_template_and_broken_ones(template, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(chat_tokenizer(template))


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ ('x' * 4000000000)|length }}"
SHARED = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
SHARED += "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}"
"""Compares 2^60 pairs of elements in one step of Python, which no signal interrupts."""
LATER = "{% if messages|length > 1 %}" + LOOP + "{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP, "takes more than 0.1 s for a conversation"),
        (SHARED, "takes more than 0.1 s for a conversation"),
        (HUGE, "takes more than 1.07 GB of memory"),
        ("{{ (7 ** 7 ** 9)|length }}", "computes powers"),
        ("{%- set x = messages|length -%}{{ x**x }}", "computes powers"),
    ],
)
def test_templates_that_take_too_much(monkeypatch, template, message):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(chat_tokenizer(template))
    chat = ChatTemplate(chat_tokenizer("{{ messages[0].content }}"))  # by another process
    assert chat.render_prompt(talk("a", "b")) == "a"


def test_a_template_that_ends_its_process_is_told():
    chat = ChatTemplate(chat_tokenizer("{{ messages[0].content }}"))
    process = template_sandbox._get_worker(os.getpid())._process
    process.terminate()
    process.wait()  # or it may still answer
    with pytest.raises(ConfigError, match=r"ended the process that reads it \(exit code -15\)"):
        chat.render_prompt(talk("a", "b"))
    assert chat.render_prompt(talk("a", "b")) == "a"


@pytest.mark.filterwarnings("ignore:os.fork")  # where another test of the process runs JAX
def test_forks_and_threads_have_their_answers():
    """Of one process each, whose answers to several threads do not mix."""
    chat = ChatTemplate(chat_tokenizer("{{ messages[0].content }}"))
    texts = [str(n) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: chat.render_prompt(talk(text, "b")), texts)) == texts
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, chat.render_prompt(talk("of a fork", "b")).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 99) == b"of a fork"
    os.close(read)
    os.close(write)
    assert chat.render_prompt(talk("a", "b")) == "a"


def test_an_interruption_leaves_no_answer_behind(monkeypatch):
    """The next conversation gets its own."""
    chat = ChatTemplate(chat_tokenizer("{{ messages[0].content }}"))
    real = template_sandbox._exchange_line

    def interrupted(*given):
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template_sandbox, "_exchange_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.render_prompt(talk("a", "b"))
    assert chat.render_prompt(talk("c", "d")) == "c"


def test_a_conversation_that_takes_too_long_ends_the_reading(monkeypatch):
    """Rows that a template refuses are left out; after this one there would be no end."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    chat = ChatTemplate(chat_tokenizer(LATER))
    with pytest.raises(ConfigError, match="takes more than"):
        chat.example_or_none(FileLocation("rows", 1), talk("a", "b"))


def test_what_only_looks_like_a_power_is_none():
    template = "{% macro f(a) %}{{ a }}{% endmacro %}**{{ '2**3' }}{{ f(**{'a': 5}) }}"
    assert ChatTemplate(chat_tokenizer(template)).render_prompt(talk("a", "b")) == "**2**35"


def test_a_template_and_its_variables_can_be_given(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{{ more }}{% endfor %}")
    chat = load_chat_template(chat_tokenizer(None), str(file), '{"more": "!"}', "answers")
    assert chat.render_prompt(talk("a", "b")) == "a<|endoftext|>!b<|endoftext|>!"
    for wrong in ("[]", "{", '"'):
        with pytest.raises(ConfigError, match="must be a JSON object"):
            load_chat_template(chat_tokenizer(None), str(file), wrong, "answers")


# ---- rows of a run ------------------------------------------------------------------------------
def run_of(tmp_path: Path, rows: list[Any], shape: Any = CAUSAL_LM, **data: Any) -> Pipeline:
    file, folder = tmp_path / "rows.jsonl", tmp_path / "tokenizer"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat_tokenizer(plain(TEMPLATES[data.pop("template", "chatml")])).save_pretrained(folder)
    config_class, preset = (LlamaConfig, "qwen3_tiny") if shape is CAUSAL_LM else (T5Config, "tiny")
    given = {
        "data": {"dataset": "mnli", "train": str(file), "tokenizer": str(folder)} | data,
        "model": vocabulary(config_class, 640) | {"sequence_length": 64},
    }
    return Pipeline(load_config(config_class, "finetuning", preset, given), shape)


TURNS = [
    {"role": "user", "content": "Who took the lamp?"},
    {"role": "assistant", "content": "Anna"},
]
ROWS = {
    "messages": {"messages": TURNS},
    "sharegpt": {"conversations": [{"from": "human", "value": "Who took the lamp?"},
                                   {"from": "gpt", "value": "Anna"}]},
    "text": {"messages": json.dumps(TURNS)},
    "lists": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "parts": {"messages": [TURNS[0] | {"content": [{"type": "text", "text": "Who took "},
                                                   {"type": "text", "text": "the lamp?"}]},
                           TURNS[1]]},
    "alpaca": {"instruction": "Who took the lamp?", "input": "", "output": "Anna"},
    "pair": {"prompt": "Who took the lamp?", "completion": "Anna"},
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_every_form_are_the_same_conversation(tmp_path, form):
    needed = {"format": "conversational"} if form in ("alpaca", "pair") else {}
    data = run_of(tmp_path, [ROWS[form]], **needed)
    samples = data.make_training_samples()
    batch, base = samples.take([0]), data.tokenizer.hf_tokenizer
    whole = base.apply_chat_template(TURNS, tokenize=True)["input_ids"]
    np.testing.assert_array_equal(batch["input_ids"][0][: len(whole) - 1], whole[:-1])
    assert base.decode(batch["labels"][batch["labels"] >= 0]) == "Anna<|im_end|>"
    assert (data.config.data.format, data.config.model.eos_token_id) == (
        "conversational",
        data.chat_template.stop_token_id,
    )


def test_a_system_message_is_added_where_there_is_none(tmp_path):
    data = run_of(tmp_path, [ROWS["messages"]], system="Be brief.")
    (example,) = data.read_corpus("train").examples
    assert example.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_everything_is_learned_if_asked(tmp_path):
    batch = run_of(tmp_path, [ROWS["messages"]], loss_on="all").make_training_samples().take([0])
    there = batch["segment_ids"] > 0
    assert (batch["labels"][there] >= 0).all()


def test_rows_that_the_template_refuses_are_named(tmp_path, capsys):
    bad = {"messages": TURNS[::-1]}
    data = run_of(tmp_path, [ROWS["messages"], *[bad] * 5], template="gemma")
    assert len(data.read_corpus("train").examples) == 1
    said = capsys.readouterr().err
    assert "5 conversations are left out: " in said
    assert "rows.jsonl, line 2: the chat template refuses it: Conversation roles must" in said
    assert "; and 2 more" in said
    with pytest.raises(DataError, match="no conversation to learn from"):
        run_of(tmp_path, [bad], template="gemma").read_corpus("train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [3]}, "message 1 is 3, but must be an object"),
        ({"messages": [{"content": "a"}]}, "message 1 must have a role"),
        ({"messages": [{"role": "user"}]}, "message 1 has neither content nor"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "must hold text"),
        ({"messages": TURNS, "tools": [3]}, "column 'tools' must hold objects"),
        ({"messages": "nothing"}, "must hold a list"),
        ({"prompt": "a", "completion": "b", "history": ["c"]}, "must hold pairs"),
    ],
)
def test_rows_that_are_no_conversations_are_refused(tmp_path, row, message):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        run_of(tmp_path, [row], messages="messages" if "messages" in row else None,
               format="conversational").read_corpus("train")  # fmt: skip


NULLS = [
    {"messages": None},
    {"messages": [TURNS[0], {"role": "assistant", "content": None}]},
    {"prompt": None, "completion": "Anna"},
]


@pytest.mark.parametrize("row", NULLS)
def test_nulls_in_conversations(tmp_path, row, capsys):
    rows = [ROWS["messages"], row]
    with pytest.raises(DataError, match="line 2: .* --data.on_null skip leaves such rows out"):
        run_of(tmp_path, rows).make_training_samples()
    assert len(run_of(tmp_path, rows, on_null="skip").make_training_samples()) == 1
    assert "1 with null left out" in capsys.readouterr().err
    read = run_of(tmp_path, rows, on_null="empty").read_corpus("train").examples
    assert len(read) == (1 if row == NULLS[0] else 2)  # no messages: there is no answer


@pytest.mark.parametrize("row", [{"messages": []}, {"conversations": "[]"}])
def test_a_conversation_without_messages_is_one_without_an_answer(tmp_path, row, capsys):
    data = run_of(tmp_path, [ROWS["messages"], row], format="conversational")
    assert len(data.read_corpus("train").examples) == 1
    assert "line 2: it has no turn of the assistant" in capsys.readouterr().err


def test_old_function_calls_are_tool_calls():
    call = {"name": "find", "arguments": '{"what": "lamp ☃"}'}
    openai = {"messages": [{"role": "assistant", "content": None, "function_call": call}]}
    sharegpt = {"conversations": [{"from": "function_call", "value": json.dumps(call)}]}
    for row in (openai, sharegpt):
        (message,) = read_conversation(row).messages
        assert message["tool_calls"] == [{"type": "function", "function": CALL}]


@pytest.mark.parametrize(("on_long_target", "kept"), [("truncate", 2), ("skip", 1)])
def test_conversations_that_are_too_long(tmp_path, on_long_target, kept):
    long = {"messages": [TURNS[0], {"role": "assistant", "content": "the lamp " * 60}]}
    lost = {"messages": [{"role": "user", "content": "the lamp " * 60}, TURNS[1]]}
    rows = [ROWS["messages"], long, lost]
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: 2 of 3 conversations are too long"):
        run_of(tmp_path, rows).make_training_samples()
    samples = run_of(tmp_path, rows, on_long_target=on_long_target).make_training_samples()
    assert (len(samples), samples.truncation_counts.dropped) == (kept, 3 - kept)
    assert (samples.take(np.arange(kept))["labels"] >= 0).any(axis=1).all()


def test_an_encoder_decoder_answers_what_precedes_the_last_answer(tmp_path):
    rows = [{"messages": [*TURNS, *TURNS]}]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                        "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    data = run_of(tmp_path, rows, SEQ2SEQ, chat_template=str(template))
    (example,) = data.read_corpus("train").examples
    assert example[:2] == (
        "user: Who took the lamp?\nassistant: Anna\nuser: Who took the lamp?\nassistant: ", "Anna",
    )  # fmt: skip
    short = encode([example], data.tokenizer, 8, 8, truncate_left=True).take([0])["input_ids"]
    whole = next(data.tokenizer.encode([example.prompt]))
    np.testing.assert_array_equal(short[0], [whole[0], *whole[-6:], data.tokenizer.eos_token_id])
    batch = data.make_samples(data.read_corpus("train")).take([0])
    assert data.tokenizer.decode(batch["labels"].clip(0))[0].startswith("Anna")
