"""Tools and calls of rows, in files whose tables have all fields of all rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from config.llama import LlamaConfig
from config.presets import load_config
from data.causal_lm import CAUSAL_LM
from data.pipeline import Pipeline
from tests.data.chat_templates import TEMPLATES, chat_tokenizer, plain


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    properties = {"type": "object", "properties": parameters, "required": list(parameters)[:1]}
    function = {"name": name, "description": f"It can {name}.", "parameters": properties}
    return {"type": "function", "function": function}


def talk(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": f"Please {name}."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "done", "name": name},
        {"role": "assistant", "content": "It is done."},
    ]


FIND = tool("find", what={"type": "string", "enum": ["lamp", None]}, limit={"type": "integer"})
MOVE = tool("move", where={"type": "string", "default": "here"}, who={"anyOf": [{"type": "null"}]})
ROWS = [
    {"messages": talk("find", what="lamp"), "tools": [FIND]},
    {"messages": talk("move", where="there", who="Anna"), "tools": [MOVE, FIND]},
]
SAYS_NULL = tool("find", what={"type": "string", "default": None})


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """The tools and messages as JSON in a column of text."""
    return {name: json.dumps(value) for name, value in row.items()}


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def texts(folder: Path, kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """The texts of rows with tools."""
    chat_tokenizer(plain(TEMPLATES["tools"])).save_pretrained(folder / "tokenizer")
    return read(folder, kind, rows)


def read(folder: Path, kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """The texts of rows in a file, as a run reads them with the folder's tokenizer."""
    data = {"train": str(write(folder, kind, rows)), "tokenizer": str(folder / "tokenizer")}
    given = {"data": data, "model": {"vocab_size": 640, "sequence_length": 512}}
    run = Pipeline(load_config(LlamaConfig, "finetuning", "qwen3_tiny", given), CAUSAL_LM)
    examples = run.read_corpus("train").examples
    return ["".join(span.text for span in example.rendered_spans) for example in examples]


def of_transformers(row: dict[str, Any]) -> str:
    base = chat_tokenizer(plain(TEMPLATES["tools"]))
    return str(base.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False))


KINDS = ("jsonl", "parquet", "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_tools_have_no_fields_of_other_rows(tmp_path, kind):
    assert texts(tmp_path, kind, ROWS) == [of_transformers(row) for row in ROWS]


@pytest.mark.parametrize("kind", KINDS)
def test_nulls_that_a_row_says_itself_stay(tmp_path, kind):
    """In JSON they are a person's; a table of text keeps them too."""
    rows = [{"messages": talk("find", what=None), "tools": [SAYS_NULL]}]
    given = rows if kind == "jsonl" else list(map(as_text, rows))
    (text,) = texts(tmp_path, kind, given)
    assert text == of_transformers(rows[0])
    assert '"default": null' in text
    assert '"what": null' in text


@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_a_row_are_not_those_of_another(tmp_path, kind):
    """A null would be a variable that is defined."""
    ask = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = [{"enable_thinking": False}, {"today": "now"}]
    rows = [{"messages": ask, "chat_template_kwargs": variables} for variables in own]
    source = "{{ enable_thinking is defined }}{{ today }}{% for m in messages %}{{ m.content }}"
    base = chat_tokenizer(source + "{% endfor %}")
    base.save_pretrained(tmp_path / "tokenizer")
    assert read(tmp_path, kind, rows) == ["Trueab", "Falsenowab"]
