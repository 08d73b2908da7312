"""Preferences: rows in all their forms, those that break one, and samples of two texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from config.gptj import GPTJConfig
from config.llama import LlamaConfig
from config.presets import load_config
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.length_stats import measure_lengths
from data.pipeline import Pipeline
from data.preference_samples import PreferencePair, PreferenceSamples, SamplesWithRefLogps
from data.samples import IGNORE_INDEX
from data.seq2seq import SEQ2SEQ
from data.sources import DataError
from tests.small_runs import vocabulary

KINDS: dict[str, tuple[Any, Any]] = {
    "tiny": (T5Config, SEQ2SEQ),
    "gptj_tiny": (GPTJConfig, CAUSAL_LM),
    "qwen3_tiny": (LlamaConfig, CAUSAL_LM),
}
Rows = list[dict[str, Any]]


def data_of(tmp_path: Path, preset: str, rows: Rows, objective: str = "dpo",
            length: int = 64, **data: object) -> Pipeline:  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config_class, shape = KINDS[preset]
    data = {"dataset": "sample", "train": str(file), "validation": None} | data
    if preset != "tiny":
        data |= {"packing": False, "separator": ""}
    sections = {
        "data": data,
        "training": {"objective": objective},
        "model": vocabulary(config_class, 640) | {"sequence_length": length},
    }
    return Pipeline(load_config(config_class, "finetuning", preset, sections), shape)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ---- rows ---------------------------------------------------------------------------------------
PAIR = [("Anna took", " the lamp"), ("Anna took", " a cat")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Anna took", "chosen": " the lamp", "rejected": " a cat"},
        {"chosen": "Anna took the lamp", "rejected": "Anna took a cat"},
    ],
)
def test_texts_with_a_prompt_or_what_both_begin_with(tmp_path: Path, row: Any) -> None:
    examples = data_of(tmp_path, "gptj_tiny", [row]).read_corpus("train").examples
    assert [example[:2] for example in examples] == PAIR


def test_a_template_says_the_prompt(tmp_path: Path) -> None:
    row = {"q": "Anna", "chosen": " the lamp", "rejected": " a cat"}
    data = data_of(tmp_path, "gptj_tiny", [row], prompt="{q} took")
    assert [example[:2] for example in data.read_corpus("train").examples] == PAIR


@pytest.mark.parametrize(
    ("row", "objective", "desirable"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "kto", [True]),
        ({"prompt": "a", "completion": "b", "label": 0}, "kto", [False]),
        ({"prompt": "a", "completion": "b", "label": "FALSE"}, "kto", [False]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "kto", [True, False]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "orpo", [None, None]),
    ],
)
def test_answers_that_are_liked_or_not(tmp_path, row, objective, desirable) -> None:
    examples = data_of(tmp_path, "gptj_tiny", [row], objective).read_corpus("train").examples
    assert [example.desirable for example in examples] == desirable


ASKED = "Ben took the green book to the garden. Where is it?"
CHATS: list[dict[str, Any]] = [
    {"prompt": [user(ASKED)], "chosen": [assistant("garden")], "rejected": [assistant("bus")]},
    {"chosen": [user(ASKED), assistant("garden")], "rejected": [user(ASKED), assistant("bus")]},
    {"prompt": ASKED, "chosen": [user(ASKED), assistant("garden")],
     "rejected": [user(ASKED), assistant("bus")]},
    {"prompt": ASKED, "chosen": [assistant("garden")], "rejected": [assistant("bus")]},
    {"prompt": [user(ASKED)], "chosen": "garden", "rejected": "bus"},
    {"prompt": json.dumps([user(ASKED)]), "chosen": json.dumps([assistant("garden")]),
     "rejected": json.dumps([assistant("bus")])},
]  # fmt: skip


@pytest.mark.parametrize("row", CHATS)
def test_messages_with_a_prompt_or_what_both_begin_with(tmp_path: Path, row: Any) -> None:
    """All of them are one conversation, of which the answer and what ends it are learned."""
    tokenizer = "data/sample/chat_tokenizer"
    data = data_of(tmp_path, "qwen3_tiny", [row], format="conversational", tokenizer=tokenizer)
    one, other = data.read_corpus("train").examples
    asks = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt == other.prompt == asks
    for example, answer in ((one, "garden"), (other, "bus")):
        assert [span.text for span in example.rendered_spans if span.in_loss] == [
            f"{answer}<|im_end|>"
        ]


def test_what_was_answered_before_is_not_learned(tmp_path: Path) -> None:
    before = [user(ASKED), assistant("In the garden."), user("Who took it?")]
    row = {"prompt": before, "chosen": [assistant("Ben")], "rejected": [assistant("Eva")]}
    tokenizer = "data/sample/chat_tokenizer"
    for loss_on in ("completion", "all", "last_turn"):
        data = data_of(
            tmp_path, "qwen3_tiny", [row], tokenizer=tokenizer, loss_on=loss_on, length=128
        )
        for example in data.read_corpus("train").examples:
            learned = [span.text for span in example.rendered_spans if span.in_loss]
            assert learned in (["Ben<|im_end|>"], ["Eva<|im_end|>"])


GOOD = {"prompt": "Anna took", "chosen": " the lamp", "rejected": " a cat"}
MARK = {"prompt": "Anna took", "completion": " the lamp", "label": True}


@pytest.mark.parametrize(
    ("row", "objective", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "dpo", "columns are prompt, chosen, but preferences need"),
        ({"prompt": "a", "completion": "b"}, "kto", "need prompt, completion and label, or"),
        (MARK, "dpo", "answers with a label are for --training.objective kto"),
        ({**GOOD, "chosen": None}, "dpo", "'chosen' holds null.*--data.on_null skip"),
        ({**GOOD, "rejected": None}, "dpo", "'rejected' holds null.*--data.on_null skip"),
        ({**GOOD, "prompt": None}, "dpo", "null.*--data.on_null skip"),
        ({"chosen": "Anna", "rejected": "Paul"}, "dpo", "begin differently"),
        ({**MARK, "label": None}, "kto", "'label' holds null"),
        ({**MARK, "label": "maybe"}, "kto", "'label' holds 'maybe', but must be true or false"),
        ({**GOOD, "chosen": [user("a")]}, "dpo", "chosen"),
        ({**GOOD, "chosen": {"a": 1}}, "dpo", "chosen"),
    ],
)
@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_a_row_that_breaks_the_form_is_named(tmp_path, preset, row, objective, said) -> None:
    good = MARK if objective == "kto" else GOOD
    with pytest.raises(DataError, match=f"rows.jsonl, line 2: .*{said}"):
        data_of(tmp_path, preset, [good, row], objective).read_corpus("train")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": [user("a")], "rejected": [assistant("b")]}, "'chosen' must end with a message"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a")]}, "'rejected' must end"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]},
         "begin differently"),
        ({"chosen": [{"role": 3}], "rejected": [assistant("d")]}, "must have a role"),
        ({"prompt": 3, "chosen": [assistant("b")], "rejected": [assistant("c")]}, "prompt"),
    ],
)  # fmt: skip
def test_a_conversation_that_breaks_the_form_is_named(tmp_path, row, said) -> None:
    data = data_of(tmp_path, "qwen3_tiny", [CHATS[0], row], format="conversational",
                   tokenizer="data/sample/chat_tokenizer")  # fmt: skip
    with pytest.raises(DataError, match=f"rows.jsonl, line 2: .*{said}"):
        data.read_corpus("train")


def test_rows_with_null_are_left_out_if_wanted(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "chosen": None}, {**GOOD, "rejected": None}, GOOD]
    corpus = data_of(tmp_path, "gptj_tiny", rows, on_null="skip").read_corpus("train")
    assert (len(corpus.examples), corpus.nulls) == (4, 2)
    assert [corpus.row_location(i).number for i in range(4)] == [1, 1, 4, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("preset", "row"),
    [
        ("tiny", {**GOOD, "chosen": " a cat"}),
        ("gptj_tiny", {**GOOD, "chosen": " a cat"}),
        ("gptj_tiny", {"chosen": "Anna took a cat", "rejected": "Anna took a cat"}),
        ("qwen3_tiny", {"prompt": [user("a")], "chosen": [assistant("b")],
                        "rejected": [assistant("b")]}),
        ("qwen3_tiny", {"chosen": [user("a"), assistant("b")],
                        "rejected": [user("a"), assistant("b")]}),
    ],
)  # fmt: skip
def test_pairs_of_equal_answers_are_taken_and_counted(tmp_path, capsys, preset, row) -> None:
    chat = isinstance(row["chosen"], list)
    good = CHATS[0] if chat else GOOD
    given = {"format": "conversational", "tokenizer": "data/sample/chat_tokenizer"} if chat else {}
    given |= {"on_long_target": "truncate"} if preset == "tiny" else {}
    data = data_of(tmp_path, preset, [good, row, row, good], length=128, **given)
    batch = data.make_training_samples().take(np.arange(4))
    assert (batch["num_loss_tokens"] > 0).all()
    assert np.count_nonzero(batch["num_loss_tokens"][:, 0] == batch["num_loss_tokens"][:, 1]) >= 2
    assert "2 pairs of equal answers, which teach no preference" in capsys.readouterr().err


# ---- answers of several messages ----------------------------------------------------------------
HISTORIES: list[dict[str, Any]] = [
    {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
     "rejected": [user("a"), assistant("e"), user("f"), assistant("g")]},
    {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
     "rejected": [user("a"), assistant("g")]},
    {"chosen": [user("a"), assistant("b")],
     "rejected": [user("a"), assistant("b"), user("f"), assistant("g")]},
    {"prompt": [user("a")], "chosen": [assistant("b"), user("c"), assistant("d")],
     "rejected": [assistant("g")]},
    {"prompt": "a", "chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
     "rejected": [user("a"), assistant("b"), user("f"), assistant("g")]},
    {"chosen": [{"role": "system", "content": "s"}, user("a"), assistant("b")],
     "rejected": [{"role": "system", "content": "s"}, user("c"), assistant("d")]},
    {"prompt": "a", "chosen": [{"role": "system", "content": "s"}, user("a"), assistant("b")],
     "rejected": [{"role": "system", "content": "s"}, user("a"), assistant("d")]},
]  # fmt: skip


def common_beginning(one: Rows, other: Rows) -> Rows:
    """Of two conversations; TRL's `extract_prompt` agrees, see `test_trl_splits_pairs_alike`."""
    last = min(len(one), len(other)) - 1
    return one[: next((i for i in range(last) if one[i] != other[i]), last)]


@pytest.mark.slow
@pytest.mark.parametrize("row", HISTORIES)
def test_trl_splits_pairs_alike(row: Any) -> None:
    from trl import extract_prompt  # it takes seconds

    answers = {name: row[name] for name in ("chosen", "rejected")}
    assert common_beginning(*answers.values()) == extract_prompt(answers)["prompt"]


@pytest.mark.parametrize("row", HISTORIES)
def test_histories_that_differ_belong_to_the_answers(tmp_path: Path, row: Any) -> None:
    """As in TRL, the prompt is what both conversations begin with."""
    in_answers = isinstance(row.get("prompt"), str) or "prompt" not in row
    both = {n: row[n] if in_answers else [*row["prompt"], *row[n]] for n in ("chosen", "rejected")}
    shared = common_beginning(*both.values())
    data = data_of(tmp_path, "qwen3_tiny", [row], format="conversational",
                   tokenizer="data/sample/chat_tokenizer")  # fmt: skip
    examples = data.read_corpus("train").examples
    template = data.tokenizer.hf_tokenizer.apply_chat_template
    asks = shared[-1]["role"] == "user"
    for example, messages in zip(examples, both.values(), strict=True):
        assert "".join(span.text for span in example.rendered_spans) == template(
            messages, tokenize=False
        )
        answers = row.get("prompt") if not in_answers else shared
        learned = [f"{m['content']}<|im_end|>" for m in messages[len(answers) :]
                   if m["role"] == "assistant"]  # fmt: skip
        assert [span.text for span in example.rendered_spans if span.in_loss] == learned
        assert example.prompt == template(shared, tokenize=False, add_generation_prompt=asks)


@pytest.mark.parametrize("row", HISTORIES)
def test_an_encoder_reads_what_both_conversations_begin_with(tmp_path: Path, row: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    data = data_of(tmp_path, "tiny", [row], format="conversational", chat_template=str(template))
    one, other = data.read_corpus("train").examples
    assert one.prompt == other.prompt
    for example, name in ((one, "chosen"), (other, "rejected")):
        given = row[name] if isinstance(row.get("prompt", ""), str) else row["prompt"] + row[name]
        whole = "".join(f"{m['role']}: {m['content']}\n" for m in given)
        assert example.prompt + example.target == whole.rstrip("\n")


# ---- samples ------------------------------------------------------------------------------------
TEXTS = [
    {"prompt": f"{name} took the", "chosen": " lamp", "rejected": " red clock by bus"}
    for name in ("Anna", "Paul", "Eva", "Leo", "Sara")
]


def samples_of(data: Pipeline) -> PreferenceSamples:
    samples = data.make_samples(data.read_tokenized_corpus("train"))
    assert isinstance(samples, PreferenceSamples)
    return samples


def learned(tokenizer: Any, labels: np.ndarray) -> str:
    return str(tokenizer.decode(labels[labels != IGNORE_INDEX]))


@pytest.mark.parametrize(("length", "places"), [(64, 1), (128, 4)])
def test_both_texts_of_a_pair_share_a_row(tmp_path: Path, length: int, places: int) -> None:
    data = data_of(tmp_path, "gptj_tiny", TEXTS, length=length, examples_per_sample=places)
    samples, base = samples_of(data), data.tokenizer.hf_tokenizer
    batch = samples.take(np.arange(len(samples)))
    found = []
    for row, unit in np.ndindex(len(samples), places):
        count = batch["num_loss_tokens"].reshape(len(samples), places, 2)[row, unit]
        both = []
        for answer in (0, 1):
            own = batch["segment_ids"][row] == 2 * unit + answer + 1
            assert np.count_nonzero(batch["labels"][row][own] != IGNORE_INDEX) == count[answer]
            both.append((base.decode(batch["input_ids"][row][own]),
                         learned(base, batch["labels"][row][own])))  # fmt: skip
        if count.any():
            found.append(both)
    assert len(samples) == -(-5 // places)
    wanted = [
        [(f"{row['prompt']}{row[name]}", f"{row[name]}{base.eos_token}")
         for name in ("chosen", "rejected")] for row in TEXTS
    ]  # fmt: skip
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("places", [1, 3])
def test_an_encoder_reads_a_prompt_once_for_both_answers(tmp_path: Path, places: int) -> None:
    data = data_of(tmp_path, "tiny", TEXTS, examples_per_sample=places)
    data = replace(data, user_config=replace(data.user_config, model=replace(
        data.user_config.model, decoder_sequence_length=12)))  # fmt: skip
    samples, base = samples_of(data), data.tokenizer.hf_tokenizer
    batch = samples.take(np.arange(len(samples)))
    labels = batch["labels"].reshape(len(samples), places, 2, -1)
    found = set()
    for row, unit in np.ndindex(len(samples), places):
        own = batch["segment_ids"][row] == unit + 1
        if own.any():
            prompt = base.decode(batch["input_ids"][row][own], skip_special_tokens=True)
            answers = (learned(base, labels[row, unit, i]) for i in (0, 1))
            found.add((prompt, *(a.removesuffix(base.eos_token).strip() for a in answers)))
    assert found == {(r["prompt"], r["chosen"].strip(), r["rejected"].strip()) for r in TEXTS}
    assert len(samples) == -(-5 // places)
    assert samples.num_loss_tokens.shape == (5, 2)


@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_an_answer_that_is_judged_goes_with_that_of_the_next_row(tmp_path, preset) -> None:
    rows = [{"prompt": r["prompt"], "completion": f" {word}", "label": word != "bus"}
            for r, word in zip(TEXTS, ("lamp", "bus", "book"), strict=False)]  # fmt: skip
    data = data_of(tmp_path, preset, rows, "kto", examples_per_sample=1)
    samples, base = samples_of(data), data.tokenizer.hf_tokenizer
    batch = samples.take(np.arange(3))
    assert batch["kto_labels"].tolist() == [[1], [-1], [1]]
    if preset == "tiny":
        texts = [learned(base, labels).strip() for labels in batch["labels"]]
    else:
        texts = [
            learned(base, batch["labels"][row][batch["segment_ids"][row] == place]).strip()
            for row in range(3) for place in (1, 2)
        ]  # fmt: skip
        first = base.decode(batch["input_ids"][0][batch["segment_ids"][0] == 2])
        assert first == "Anna took the bus"
    words = ["lamp", "bus", "bus", "book", "book", "lamp"]
    assert [text.removesuffix(base.eos_token).strip() for text in texts] == words


@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 1, 1), (4, 1), (1, 3, 2), (3,), (1,)])
def test_the_divergence_is_of_answers_to_other_prompts(tmp_path, preset, sizes) -> None:
    """Where pairs are judged answers, and where several rows have a prompt."""
    names = [TEXTS[i]["prompt"] for i, size in enumerate(sizes) for _ in range(size)]
    if set(sizes) == {2}:
        rows: Rows = [{"prompt": name, "chosen": f" c{i}", "rejected": f" r{i}"}
                      for i, name in enumerate(dict.fromkeys(names))]  # fmt: skip
    else:
        rows = [{"prompt": name, "completion": f" {i}", "label": True}
                for i, name in enumerate(names)]  # fmt: skip
    data = data_of(tmp_path, preset, rows, "kto")
    corpus = data.read_tokenized_corpus("train")
    units = PreferencePair.from_examples(corpus.examples, corpus.tokens or (), unpaired=True)
    pairs = [unit.examples for unit in units]
    assert [one for one, _ in pairs] == list(corpus.examples)
    if len(sizes) > 1:
        assert all(one.prompt != other.prompt for one, other in pairs)
    if len(set(sizes)) == 1:
        others = sorted(other.target for _, other in pairs)
        assert others == sorted(one.target for one, _ in pairs), "each answer counts once"


def test_pairs_that_are_too_long_are_named_dropped_or_cut(tmp_path: Path) -> None:
    long = {"prompt": "the red lamp " * 5, "chosen": "and the clock", "rejected": "and the bus"}
    data = data_of(tmp_path, "gptj_tiny", [*TEXTS, long], length=24)
    with pytest.raises(ConfigError, match=r"line 6: the two texts have \d+ tokens together"):
        data.make_training_samples()
    settings = replace(data.user_config.data, on_long_target="skip")
    dropped = samples_of(replace(data, user_config=replace(data.user_config, data=settings)))
    assert (len(dropped.num_loss_tokens), dropped.truncation_counts.dropped) == (5, 1)
    settings = replace(data.user_config.data, on_long_target="truncate")
    cut = samples_of(replace(data, user_config=replace(data.user_config, data=settings)))
    assert (len(cut.num_loss_tokens), cut.truncation_counts.prompts) == (6, 1)
    batch, base = cut.take(np.arange(len(cut))), data.tokenizer.hf_tokenizer
    texts = [base.decode(row[s == p]) for row, s in zip(batch["input_ids"], batch["segment_ids"],
             strict=True) for p in range(1, s.max() + 1)]  # fmt: skip
    kept = [text for text in texts if "and the" in text]
    assert len(kept) == 2
    beginnings = {text.partition("and")[0] for text in kept}
    assert len(beginnings) == 1, "both prompts lose as much"


@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_lengths_are_those_of_both_texts(tmp_path: Path, preset: str) -> None:
    """A configuration with them holds all pairs."""
    data = data_of(tmp_path, preset, TEXTS, length=512)
    lengths = measure_lengths(data, ["train"])
    model = replace(data.user_config.model, sequence_length=lengths.longest)
    if preset == "tiny":
        model = replace(model, decoder_sequence_length=lengths.target)
    fitted = replace(data.user_config, model=model)
    assert samples_of(replace(data, user_config=fitted)).truncation_counts.format_messages(0) == []
    shorter = replace(model, sequence_length=lengths.longest - 1)
    short = replace(data, user_config=replace(data.user_config, model=shorter))
    if preset == "gptj_tiny":
        with pytest.raises(ConfigError, match="two texts"):
            samples_of(short)
    else:
        assert samples_of(short).truncation_counts.prompts > 0


def test_a_mixture_keeps_what_the_reference_says_with_its_texts(tmp_path: Path) -> None:
    for name, some in (("a", TEXTS[:3]), ("b", TEXTS[3:])):
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    mix = tmp_path / "mix.yml"
    mix.write_text("one: {train: a.jsonl, weight: 1}\ntwo: {train: b.jsonl, weight: 1}\n")
    data = data_of(tmp_path, "gptj_tiny", [], train=str(mix), examples_per_sample=1)
    samples = data.make_training_samples()
    assert len(samples) == 6
    marks = np.arange(12, dtype=np.float32).reshape(6, 1, 2)
    batch = SamplesWithRefLogps(samples, marks).take(np.asarray([4, 0, 5]))
    assert batch["ref_logps"].tolist() == [[8, 9], [0, 1], [10, 11]]
    assert batch["num_loss_tokens"].shape == (3, 2)
    alone = [samples.take(np.asarray([i]))["input_ids"][0] for i in (4, 0, 5)]
    np.testing.assert_array_equal(batch["input_ids"], alone)


def test_digests_tell_what_is_liked_apart(tmp_path: Path) -> None:
    rows = [MARK, {**MARK, "completion": " a cat"}]
    one = samples_of(data_of(tmp_path, "gptj_tiny", rows, "kto"))
    other = samples_of(
        data_of(tmp_path, "gptj_tiny", [rows[0], {**rows[1], "label": False}], "kto")
    )
    assert one.digest != other.digest
