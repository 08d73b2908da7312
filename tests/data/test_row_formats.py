"""What columns mean: usual names, what goes between them in one stream, advice for the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import UserError
from config.gptj import GPTJConfig
from config.sections import Data
from data.causal_lm import CAUSAL_LM
from data.pipeline import Pipeline
from data.task import SAMPLE_FOLDER, task_from_config
from tests.data.chat_templates import TEMPLATES, chat_tokenizer
from tests.data.corpora import few_rows, sample_tokenizer

TOKENIZER = str(SAMPLE_FOLDER / "gptj_tokenizer")


MODEL = {"eos_token_id": 0, "pad_token_id": 1, "embedding": {"vocab_size": 1024}}


def file_of(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pipeline(file: str, **data: Any) -> Pipeline:
    model = MODEL | {"sequence_length": 64}
    given = {"model": model, "data": {"train": file, "tokenizer": TOKENIZER, **data}}
    return Pipeline(GPTJConfig.from_dict(given), CAUSAL_LM)


def text_of(data: Pipeline) -> str:
    (example,) = data.read_corpus("train").examples
    return "".join(span.text for span in example.text_spans())


@pytest.mark.parametrize(
    ("row", "whole"),
    [
        ({"prompt": "Anna took", "completion": " the lamp"}, "Anna took the lamp"),
        ({"prompt": "Anna", "completion": "'s lamp"}, "Anna's lamp"),
        ({"question": "Who?", "answer": "Anna"}, "Who?\nAnna"),
        ({"query": "Who?", "response": "Anna"}, "Who?\nAnna"),
        ({"instruction": "Who?", "response": "Anna"}, "Who?\nAnna"),
        ({"instruction": "Who?", "context": "Anna did.", "response": "A"}, "Who?\nAnna did.\nA"),
        ({"instruction": "Who?", "input": "Anna did.", "output": "A"}, "Who?\nAnna did.\nA"),
    ],
)
def test_what_goes_between_usual_columns(tmp_path, row, whole):
    data = pipeline(file_of(tmp_path, row))
    assert text_of(data) == whole
    # Prompts at generation end as they do in training.
    assert whole.startswith(
        data.sample_format.render_prompt(data.config, data.task.render_prompt(row))
    )
    assert data.config.data.separator == ("" if "completion" in row else "\n")


def test_templates_of_ones_own_are_joined_as_they_are_and_a_separator_brings_a_space(tmp_path):
    file = file_of(tmp_path, {"question": "Who?", "answer": "Anna"})
    own = {"prompt": "Q: {question} A:", "target": " {answer}"}
    assert text_of(pipeline(file, **own)) == "Q: Who? A: Anna"
    assert text_of(pipeline(file, separator=" so:")) == "Who? so: Anna"


def test_the_sample_keeps_its_separator(tmp_path, monkeypatch):
    few_rows(monkeypatch, tmp_path, train=3, validation=3)
    config = GPTJConfig.from_dict({"model": MODEL, "data": {"dataset": "sample"}})
    data = Pipeline(config, CAUSAL_LM)
    assert data.read_corpus("train").examples[0].prompt.endswith(" target:")
    assert data.config.data.separator == " target:"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Anna took", " the red lamp"), ("Who?\n", "Anna"), ("naïve ☃", " 👍🏽")],
)
def test_tokens_and_what_is_learned_are_trls(tmp_path, prompt, completion):
    """TRL tokenises the prompt, and both with the end token after them; what the prompt has is not
    learned."""
    base = sample_tokenizer("gptj")
    asked = base(prompt)["input_ids"]
    whole = base(prompt + completion + base.eos_token)["input_ids"]
    row = {"prompt": prompt, "completion": completion}
    samples = pipeline(file_of(tmp_path, row), loss_on="completion").make_training_samples()
    batch = {name: array[0] for name, array in samples.take([0]).items()}
    there = batch["segment_ids"] == 1
    np.testing.assert_array_equal(batch["input_ids"][there], whole[:-1])
    masked = [-100] * len(asked) + whole[len(asked) :]
    np.testing.assert_array_equal(batch["labels"][there], masked[1:])


def test_a_border_without_white_space_and_a_chat_template_are_said(tmp_path, capsys):
    chat_tokenizer(TEMPLATES["chatml"]).save_pretrained(tmp_path / "chat")
    row = {"prompt": "Who took it? A:", "completion": "Anna"}
    pipeline(file_of(tmp_path, row), tokenizer=str(tmp_path / "chat")).make_training_samples()
    said = capsys.readouterr().err
    assert "has a chat template: --data.format conversational" in said
    assert "joined as they are, such as 'Who took it? A:Anna': --data.separator ' '" in said
    spaced = {"prompt": "Who took it? A:", "completion": " Anna"}
    pipeline(file_of(tmp_path, spaced)).make_training_samples()
    said = capsys.readouterr().err
    assert "chat template" not in said
    assert "joined" not in said


# ---- columns that say nothing, or something that is not trained ---------------------------------
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"title": "a", "body": "b", "id": 3},
            "line 1: the columns are title, body, id, .* --data.prompt '{title}' --data.target "
            "'{body}'",
        ),
        (
            {"text": "a", "label": "b"},
            "'{text}' --data.target '{label}', or --data.format language_modeling",
        ),
        ({"it's": "a", "b": "c"}, "such as --data.prompt 'summarize"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "preferences: .* --training.objective dpo",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "give --data.prompt '{prompt}' --data.target '{chosen}'",
        ),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": []},
            "line 1: .* preferences.* give --data.messages chosen",
        ),
    ],
)
def test_advice_names_the_rows_own_columns(tmp_path, row, said):
    with pytest.raises(UserError, match=said) as error:
        task_from_config(Data(train=file_of(tmp_path, row))).read_corpus("train")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 350


def test_the_advice_for_preferences_trains(tmp_path):
    file = file_of(tmp_path, {"prompt": "a", "chosen": " b", "rejected": "c"})
    assert text_of(pipeline(file, prompt="{prompt}", target="{chosen}")) == "a b"


@pytest.mark.parametrize("preset", [{}, {"on_long_target": "error", "validation": "0.5"}])
def test_a_target_that_is_too_long_has_its_place(tmp_path, preset):
    rows = [{"prompt": f"{i}", "completion": " a" * (99 if i == 2 else 1)} for i in range(9)]
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: the target .* has 100 tokens"):
        pipeline(file_of(tmp_path, *rows), **preset).make_training_samples()
