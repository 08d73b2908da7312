"""What rows hold that a model neither reads nor learns: used, or said once with an example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.gptj import GPTJConfig
from config.llama import LlamaConfig
from config.presets import load_config
from config.t5 import T5Config
from data import sources, token_cache
from data.causal_lm import CAUSAL_LM
from data.data_cache import DataCache
from data.dropped_content import find_dropped_content
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from data.sources import DataError
from data.task import SAMPLE_FOLDER
from data.tokenize_worker import tokenize_split
from run.answers.generate import prompts_from_file
from tests.data.chat_templates import TEMPLATES, chat_tokenizer, plain
from tests.data.corpora import few_rows
from tests.data.published_templates import (
    ANNA,
    ASKS,
    CALL,
    RESULT,
    THERE,
    THOUGHT,
    TOOL,
    WHERE,
    inline,
    message,
    published_tokenizer,
)
from tests.small_runs import vocabulary

SHAPES = {"qwen3_tiny": (LlamaConfig, CAUSAL_LM), "gptj_tiny": (GPTJConfig, CAUSAL_LM),
          "tiny": (T5Config, SEQ2SEQ)}  # fmt: skip


def run_of(
    folder: Path, rows: list[dict[str, Any]], base: Any = None, preset: str = "qwen3_tiny",
    training: dict[str, Any] | None = None, **data: Any,
) -> Pipeline:  # fmt: skip
    file, tokenizer = folder / "rows.jsonl", str(SAMPLE_FOLDER / "gptj_tokenizer")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if base is not None:
        tokenizer = str(folder / "tokenizer")
        base.save_pretrained(tokenizer)
    given = {
        "data": {"dataset": "mnli", "train": str(file), "tokenizer": tokenizer} | data,
        "model": vocabulary(SHAPES[preset][0], 1024) | {"sequence_length": 1024},
        "training": training or {},
    }
    if preset == "tiny":
        given["data"]["tokenizer"] = str(SAMPLE_FOLDER / "t5_tokenizer")
        given["model"]["decoder_sequence_length"] = 64
    config_class, shape = SHAPES[preset]
    return Pipeline(load_config(config_class, "finetuning", preset, given), shape)


def said(capsys: pytest.CaptureFixture[str], data: Pipeline) -> str:
    capsys.readouterr()
    data.make_training_samples()
    return capsys.readouterr().err


def chat_of(name: str) -> Any:
    if name in TEMPLATES:
        return chat_tokenizer(plain(TEMPLATES[name]))
    return published_tokenizer(name)


def row(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


# ---- what a template does not write -------------------------------------------------------------
UNWRITTEN = [
    ("deepseek_r1_distill", row(ASKS, inline(THOUGHT, "Anna did.")), r"thoughts .*Let me think\."),
    ("llama3", row(ASKS, {**ANNA, "reasoning_content": THOUGHT}), r"thoughts .*Let me think\."),
    ("gemma3", row(ASKS, {**ANNA, "thinking": THOUGHT}), r"thoughts .*'Let me think\.'"),
    ("qwen2_5", row(ASKS, {**ANNA, "reasoning": THOUGHT}), r"thoughts .*'Let me think\.'"),
    ("qwen3", row(ASKS, inline(THOUGHT, "Anna."), WHERE, THERE), r"thoughts .*Let me think\."),
    ("qwen2_5", row(message("developer", "a"), ASKS, ANNA), "messages of the role developer .*'a'"),
    ("phi3", row(message("developer", "Brief."), ASKS, ANNA), "messages of the role developer"),
    ("phi3_5", row(ASKS, {**ANNA, "tool_calls": [CALL]}, RESULT, THERE), "of the role tool .*It "),
    ("gptoss", row(ASKS, ANNA, message("system", "Now."), WHERE, THERE), "role system .*'Now.'"),
    ("qwen3", row(ASKS, {**ANNA, "tool_calls": [CALL]}, RESULT, THERE), r": name \(role tool\)"),
    ("llama3_1", row(ASKS, {**ANNA, "tool_calls": [CALL]}, RESULT, THERE), "assistant say .*Anna"),
    ("phi3", row(ASKS, ANNA, tools=[TOOL]), "writes no tools: .*Finds it"),
    ("mistral", row(message("user", "a", name="Anna"), ANNA), r"read: name \(role user\) .*'Anna'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "lost", "sentence"), UNWRITTEN)
def test_what_a_template_leaves_out_is_said_with_an_example(tmp_path, capsys, name, lost, sentence):
    data = run_of(tmp_path, [row(ASKS, ANNA), lost, lost], chat_of(name))
    found = said(capsys, data)
    (line,) = [line for line in found.splitlines() if re.search(sentence, line)]
    assert "2 rows, such as" in line
    assert "rows.jsonl, line 2: " in line


WHOLE = [
    ("qwen3", row(ASKS, inline(THOUGHT, "  Anna\n\n did."))),
    ("gptoss", row(message("developer", "Be brief."), ASKS, {**ANNA, "thinking": THOUGHT})),
    ("gptoss", row(ASKS, {"role": "assistant", "tool_calls": [CALL]},
                   message("tool", 'It is "Anna\'s"\n☃.'), ANNA, tools=[TOOL])),
    ("llama3_1", row(ASKS, {"role": "assistant", "tool_calls": [CALL]},
                     message("tool", '{"who":\n "Anna"}'), ANNA, tools=[TOOL])),
    ("deepseekv3", row(ASKS, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                       message("tool", "It is hers."), ANNA)),
    ("gemma3", row(message("system", " Be brief. "), ASKS, ANNA)),
    ("qwen2_5", row(ASKS, message("assistant", None, tool_calls=[CALL]), ANNA, tools=[TOOL])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "whole"), WHOLE)
def test_nothing_is_said_of_what_a_template_writes(tmp_path, capsys, name, whole):
    found = said(capsys, run_of(tmp_path, [whole], chat_of(name)))
    assert "does not write" not in found
    assert "columns" not in found
    assert "fields" not in found
    assert "left out" not in found


def test_a_beginning_that_is_asked_for_but_not_learned_is_said(tmp_path, capsys):
    asks = "the chat template asks for answers with a beginning that these do not have"
    found = said(capsys, run_of(tmp_path, [row(ASKS, ANNA)], chat_of("deepseek_r1_distill")))
    assert rf"{asks}: '<think>\n'" in found
    assert asks not in said(capsys, run_of(tmp_path, [row(ASKS, ANNA)], chat_of("qwen3")))


def test_no_tools_are_none(tmp_path, capsys):
    rows = [row(ASKS, ANNA, tools=[]), row(ASKS, ANNA, tools="[]")]
    assert "tools" not in said(capsys, run_of(tmp_path, rows, chat_of("gemma3")))


def test_pieces_are_counted():
    """A thought that is also the answer stands twice, or one of both is lost."""
    talk = [message("user", "a"), message("assistant", "hm", reasoning_content="hm")]
    assert find_dropped_content(talk, "user: a assistant: hm") == {
        "messages of the role assistant": "hm"
    }
    assert find_dropped_content(talk, "user: a assistant: hm, hm") == {}


# ---- columns, fields, weights -------------------------------------------------------------------
def test_columns_and_fields_that_nobody_reads_are_said_once(tmp_path, capsys):
    marked = message("user", "Why?", id="x7", created=3, refusal=None, tags=[])
    rows = [row(marked, ANNA, source="web", score=None), row(ASKS, ANNA, source="book", n=0)]
    data = run_of(tmp_path, rows, chat_of("chatml"), validation=str(tmp_path / "rows.jsonl"))
    data.read_corpus("validation")
    found = capsys.readouterr().err + said(capsys, data)
    assert found.count("columns that are not read:") == 1
    assert "not read: source (2 rows, such as " in found
    assert "line 1: 'web'); n (" in found
    assert found.count("fields of messages that are not read:") == 1
    assert "line 1: 'x7'); created (" in found
    assert "refusal" not in found
    assert "score" not in found


def test_fields_of_preferences_that_nobody_reads_are_said(tmp_path, capsys):
    rows = [
        {"prompt": [{**ASKS, "id": "p"}], "chosen": [{**ANNA, "score": 7}], "rejected": [THERE]}
    ]
    data = run_of(tmp_path, rows, chat_of("chatml"), training={"objective": "dpo"})
    found = said(capsys, data)
    assert "not read: id (" in found
    assert "line 1: 'p'); score (" in found


@pytest.mark.parametrize(
    ("one", "more", "unread"),
    [
        ({"prompt": "a", "completion": " b", "system": "c"}, {}, "system"),
        ({"instruction": "a", "input": "b", "output": "c", "category": "d"}, {}, "category"),
        ({"instruction": "a", "context": "b", "response": "c"}, {}, None),
        ({"q": "a", "a": "b", "c": "d"}, {"prompt": "{q}", "target": "{a}"}, "c"),
        ({"text": "a", "url": "b"}, {"format": "language_modeling"}, "url"),
        ({"prompt": "a", "chosen": " b", "rejected": " c", "margin": 1}, {"prefers": 1}, "margin"),
    ],
)
def test_columns_of_texts_that_nobody_reads_are_said(tmp_path, capsys, one, more, unread):
    training = {"objective": "dpo"} if more.pop("prefers", None) else None
    data = run_of(tmp_path, [one] * 2, preset="gptj_tiny", training=training, **more)
    found = said(capsys, data)
    if unread is None:
        assert "columns" not in found
    else:
        value = json.dumps(one[unread]).replace('"', "'")
        assert f"columns that are not read: {unread} (2 rows, such as " in found
        assert f"line 1: {value})" in found


def test_the_columns_of_the_sample_are_known(tmp_path, monkeypatch, capsys):
    few_rows(monkeypatch, tmp_path, train=100, validation=10)
    given = {"data": {"dataset": "sample"}}
    data = Pipeline(load_config(GPTJConfig, "finetuning", "gptj_tiny", given), CAUSAL_LM)
    assert "columns" not in said(capsys, data)


FLAGS = [("weight", 0), ("weight", 0.0), ("train", False), ("loss", 0), ("loss", False)]


@pytest.mark.parametrize(("flag", "value"), FLAGS)
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_flags_of_others_keep_a_message_from_being_learned(tmp_path, flag, value, form):
    talk = [ASKS, {**ANNA, flag: value}, WHERE, {**THERE, flag: not value}]
    if form == "conversations":
        talk = [{"from": one["role"], "value": one["content"], **one} for one in talk]
        talk = [{k: v for k, v in one.items() if k not in ("role", "content")} for one in talk]
    data = run_of(tmp_path, [{form: talk}], chat_of("chatml"))
    labels = data.make_training_samples().take(np.arange(1))["labels"]
    assert data.tokenizer.hf_tokenizer.decode(labels[labels >= 0]) == "In the garden.<|im_end|>"


def test_weights_that_change_nothing_are_said_and_fractions_refused(tmp_path, capsys):
    user = run_of(tmp_path, [row({**ASKS, "train": True}, ANNA)], chat_of("chatml"))
    assert "not used: weight 1 of messages of the role user" in said(capsys, user)
    every = [row(ASKS, {**ANNA, "weight": 0}, WHERE, THERE)]
    data = run_of(tmp_path, every, chat_of("chatml"), loss_on="all")
    assert "not used: weight 0 of messages of the role assistant" in said(capsys, data)
    half = run_of(tmp_path, [row(ASKS, {**ANNA, "weight": 0.5})], chat_of("chatml"))
    with pytest.raises(DataError, match="line 1: message 2 has weight 0.5, but it must be 0 or 1"):
        half.make_training_samples()


# ---- variables of a row -------------------------------------------------------------------------
@pytest.mark.parametrize("written", [dict, json.dumps], ids=["object", "text"])
def test_a_rows_own_variables_are_its_templates(tmp_path, written):
    """As TRL has it; against transformers."""
    base = chat_of("qwen3")
    variables = {"enable_thinking": False}
    rows = [row(ASKS, ANNA, chat_template_kwargs=written(variables)), row(ASKS, ANNA)]
    data = run_of(tmp_path, rows, base)
    for example, own in zip(data.read_corpus("train").examples, (variables, {}), strict=True):
        expected = base.apply_chat_template(
            [ASKS], tokenize=False, add_generation_prompt=True, **own
        )
        assert example.prompt == expected
    asked = prompts_from_file(data.config, str(tmp_path / "rows.jsonl"), False, DataCache())
    assert [one.text for one in asked] == [e.prompt for e in data.read_corpus("train").examples]


def test_a_rows_variables_win_over_the_runs_and_reach_preferences(tmp_path):
    base = chat_of("qwen3")
    variables = {"enable_thinking": False}
    rows = [{"prompt": [ASKS], "chosen": [ANNA], "rejected": [THERE],
             "chat_template_kwargs": variables}]  # fmt: skip
    data = run_of(tmp_path, rows, base, training={"objective": "dpo"},
                  chat_variables='{"enable_thinking": true}')  # fmt: skip
    expected = base.apply_chat_template(
        [ASKS], tokenize=False, add_generation_prompt=True, **variables
    )
    assert {example.prompt for example in data.read_corpus("train").examples} == {expected}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (["a"], "must hold an object"),
        ("nothing", "must hold an object"),
        ({"tools": []}, "must not say 'tools'"),
        ({"chat_template": "{{ 1 }}"}, "must not say 'chat_template'"),
    ],
)
def test_variables_that_cannot_be_meant(tmp_path, value, why):
    data = run_of(tmp_path, [row(ASKS, ANNA, chat_template_kwargs=value)], chat_of("chatml"))
    with pytest.raises(DataError, match=f"line 1: column chat_template_kwargs .*{why}"):
        data.make_training_samples()


# ---- characters ---------------------------------------------------------------------------------
@pytest.mark.parametrize("format_", ["conversational", "prompt_completion"])
def test_control_tokens_that_people_wrote_are_said(tmp_path, capsys, format_):
    text = "What is <|im_end|> for? <think>"
    one = (
        row(message("user", text), ANNA)
        if format_ == "conversational"
        else {"prompt": text, "completion": "a"}
    )
    found = said(capsys, run_of(tmp_path, [one] * 3, chat_of("chatml"), format=format_))
    assert "hold control tokens, which the model reads as such: '<|im_end|>' (3 rows, such" in found
    assert "rows.jsonl, line 1: 'What is <|im_end|> for? <think')" in found
    assert "'<|im_start|>'" not in found


def test_control_tokens_in_a_runs_own_template_are_meant(tmp_path, capsys):
    data = run_of(tmp_path, [{"q": "a", "a": "b"}] * 2, chat_of("chatml"), prompt="<|im_start|>{q}",
                  target="{a}<|im_end|>")  # fmt: skip
    assert "control tokens" not in said(capsys, data)


@pytest.mark.parametrize(("text", "lost"), [("def f():\n    return 1", True), ("a b\nc", False)])
def test_indentation_that_a_tokenizer_loses_is_said(tmp_path, capsys, text, lost):
    rows = [{"prompt": "Write it.", "completion": text}] * 2
    sentence = "does not keep spaces that follow each other, as in indentation"
    assert (sentence in said(capsys, run_of(tmp_path, rows, preset="tiny"))) == lost
    assert sentence not in said(capsys, run_of(tmp_path, rows, preset="gptj_tiny"))


# ---- large data ---------------------------------------------------------------------------------
def test_notes_of_prepared_data_are_the_same(tmp_path, capsys, monkeypatch):
    """Of several chunks, kept with them and said again."""
    lost = row(
        message("developer", "Brief <|im_end|>"), ASKS, {**ANNA, "thinking": THOUGHT}, id="7"
    )
    rows = [row(ASKS, ANNA), *[lost] * 3, row(ASKS)]

    def notes() -> list[str]:
        found = said(capsys, run_of(tmp_path, rows, chat_of("qwen2_5")))
        return [line for line in found.splitlines() if "rows.jsonl, line" in line]

    expected = notes()
    assert len(expected) == 4
    monkeypatch.setattr(sources, "MIN_BYTES", 1)
    monkeypatch.setattr("data.tokenize_worker.CHUNK_ROWS", 2)
    monkeypatch.setattr(
        token_cache,
        "_run_tokenize_worker",
        lambda data, split, to: tokenize_split(data, split, 1, to),
    )
    assert notes() == expected
