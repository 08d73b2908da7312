"""The boundary between prompt and answer: the same in training, evaluation and generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from config.gptj import GPTJConfig
from config.llama import LlamaConfig
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from tests.data.chat_templates import TEMPLATES, chat_tokenizer, plain
from tests.data.corpora import sample_tokenizer
from tests.small_runs import vocabulary

MERGES = [("A", "n"), ("n", "a"), ("An", "na"), ("Ġ", "Anna"), ("Ċ", "Ċ"), (":", "Ċ"), ("Ġ", "Ġ")]


def byte_level(first: str | None = None, last: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE that joins spaces to words and line feeds to each other, as published ones
    do, and puts these tokens around a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<pad>", *letters, *("".join(pair) for pair in MERGES)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    single = " ".join(filter(None, [first, "$A", last]))
    special = [(token, tokens.index(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def sentences() -> PreTrainedTokenizerFast:
    """Pieces of which each word begins with `▁`, as Llama 2's; `<s>` before a text."""
    letters = ["▁", *"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz:?!.,'\n"]
    merges = [("n", "n"), ("▁", "A"), ("▁A", "nn"), ("▁Ann", "a"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", "<pad>", *letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokens.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


TOKENIZERS = {
    "nothing": byte_level,
    "bos": lambda: byte_level("<s>"),
    "eos": lambda: byte_level(None, "</s>"),
    "both": lambda: byte_level("<s>", "</s>"),
    "pieces": sentences,
}


def run_of(
    folder: Path, base: PreTrainedTokenizerFast, *rows: dict[str, Any], shape: Any = CAUSAL_LM,
    length: int = 64, **given: Any,
) -> Pipeline:  # fmt: skip
    base.save_pretrained(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(folder / "rows.jsonl"), "tokenizer": str(folder / "tokenizer")}
    training = given.pop("training", {})
    config_class = {SEQ2SEQ: T5Config}.get(shape, LlamaConfig if "format" in given else GPTJConfig)
    model = vocabulary(config_class, 640) | {"sequence_length": length, "pad_token_id": 0}
    model |= {} if shape is SEQ2SEQ else {"eos_token_id": 1}
    loss = {} if shape is SEQ2SEQ or training else {"loss_on": "completion"}
    return Pipeline(
        config_class.from_dict(
            {"model": model, "data": {**data, **loss, **given}, "training": training}
        ),
        shape,
    )


def trained(data: Pipeline) -> tuple[list[int], list[int]]:
    """What precedes the first label of the first sample, and the labels."""
    batch = {name: array[0] for name, array in data.make_training_samples().take([0]).items()}
    learned = np.flatnonzero(batch["labels"] >= 0)
    first, last = learned[0], learned[-1]
    return batch["input_ids"][: first + 1].tolist(), batch["labels"][first : last + 1].tolist()


def asked(data: Pipeline) -> list[int]:
    """The tokens that an evaluation of the first example reads."""
    (example,) = data.read_corpus("train").examples
    _, prompts = data.make_prompts([example.prompt])
    return prompts.input_ids[0][prompts.mask[0] == 1].tolist()


PAIRS = [
    ("Who? A:", " Anna"),
    ("Who? A: ", "Anna"),
    ("Who? A:  ", "Anna"),
    ("Who? A: ", " Anna"),
    ("Who? A:", "Anna"),
    ("Who? A:", "\nAnna"),
    ("Who?\n", "Anna"),
    ("Who?\n\n", "Anna"),
    ("Who?\n", "\nAnna"),
    ("Who? \n ", "Anna"),
    ("Ann", "a Anna"),
    ("", "Anna"),
    ("", " Anna"),
    ("   ", "Anna"),
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(("prompt", "answer"), PAIRS)
def test_a_prompt_is_asked_as_it_was_trained(tmp_path, tokenizer, prompt, answer):
    base = TOKENIZERS[tokenizer]()
    data = run_of(tmp_path, base, {"prompt": prompt, "completion": answer})
    before, learned = trained(data)
    assert asked(data) == before
    assert base.eos_token_id not in before or before == [base.eos_token_id]
    assert learned.count(base.eos_token_id) == 1
    assert learned[-1] == base.eos_token_id
    whole = base.decode([*before, *learned], skip_special_tokens=True)
    assert whole.removeprefix(" ") == (prompt + answer).removeprefix(" ") or not prompt.strip()
    assert base.decode(learned[:-1]).strip() == answer.strip()


@pytest.mark.parametrize("separator", ["\n", " so:", " so: ", "->", " "])
def test_separators_are_asked_as_they_were_trained(tmp_path, separator):
    base = byte_level("<s>")
    data = run_of(tmp_path, base, {"prompt": "Who?", "completion": "Anna"}, separator=separator)
    before, learned = trained(data)
    assert asked(data) == before
    (answer,) = data.sample_format.encode_targets(data.config, ["Anna"], data.tokenizer)
    assert answer.tolist() == learned


def test_a_space_at_the_end_of_a_prompt_is_written_by_the_model(tmp_path):
    """As of a text that is tokenised whole: " Anna" is one token."""
    base = byte_level()
    before, learned = trained(run_of(tmp_path, base, {"prompt": "A: ", "completion": "Anna"}))
    assert before == base("A:")["input_ids"]
    assert learned == [base.convert_tokens_to_ids("ĠAnna"), base.eos_token_id]


def test_both_answers_of_a_pair_continue_the_same_prompt(tmp_path):
    base = byte_level("<s>", "</s>")
    row = {"prompt": "Who? A:", "chosen": "\nAnna", "rejected": " Ben"}
    data = run_of(tmp_path, base, row, training={"objective": "dpo"})
    batch = data.make_training_samples().take([0])
    texts = [batch["input_ids"][0][batch["segment_ids"][0] == number].tolist() for number in (1, 2)]
    prompt = base("Who? A:")["input_ids"][:-1]
    assert all(text[: len(prompt)] == prompt for text in texts)
    assert all(base.eos_token_id not in text for text in texts)


# ---- encoder-decoders -------------------------------------------------------------------------
def test_an_encoder_decoder_reads_and_writes_an_end_whatever_the_tokenizer_adds(tmp_path):
    """Some T5 tokenizers were saved without what adds it."""
    base = sample_tokenizer("t5")
    row = {"prompt": "Who took the lamp?", "completion": "Anna"}
    expected = run_of(tmp_path, base, row, shape=SEQ2SEQ)
    batch, answer = expected.make_training_samples().take([0]), asked(expected)
    base.backend_tokenizer.post_processor = processors.Sequence([])
    bare = run_of(tmp_path / "bare", base, row, shape=SEQ2SEQ)
    assert 1 not in bare.tokenizer.hf_tokenizer("Who")["input_ids"]
    for name, array in bare.make_training_samples().take([0]).items():
        np.testing.assert_array_equal(array, batch[name])
    assert asked(bare) == answer
    assert answer[-1] == bare.tokenizer.eos_token_id


# ---- what is cut -------------------------------------------------------------------------------
LONG = "Who took the lamp? " * 9


@pytest.mark.parametrize("tokenizer", ["bos", "both", "pieces"])
def test_a_long_prompt_loses_what_follows_its_first_token(tmp_path, tokenizer):
    base = TOKENIZERS[tokenizer]()
    data = run_of(tmp_path, base, {"prompt": LONG, "completion": "Anna"}, length=24)
    before, learned = trained(data)
    whole = base(LONG.rstrip())["input_ids"]
    whole = whole[:-1] if whole[-1] == base.eos_token_id else whole
    read = len(before)
    assert before == [base.bos_token_id, *whole[-(read - 1) :]]
    assert base.decode(learned[:-1]).strip() == "Anna"
    question = asked(data)
    assert question == [base.bos_token_id, *whole[-23:]]


def test_a_long_pair_loses_what_follows_its_first_token(tmp_path):
    base = byte_level("<s>")
    row = {"prompt": LONG, "chosen": "Anna", "rejected": "Ben"}
    data = run_of(
        tmp_path, base, row, length=64, on_long_target="truncate", training={"objective": "dpo"}
    )
    batch = data.make_training_samples().take([0])
    for number in (1, 2):
        text = batch["input_ids"][0][batch["segment_ids"][0] == number]
        assert text[0] == base.bos_token_id
        assert "took the lamp? " in base.decode(text)


def test_a_question_to_a_chat_model_keeps_its_first_token(tmp_path):
    base = chat_tokenizer(plain(TEMPLATES["llama3"]))
    row = {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "A"}]}
    data = run_of(tmp_path, base, row, length=256, format="conversational")
    (example,) = data.read_corpus("train").examples
    whole = base(example.prompt, add_special_tokens=False)["input_ids"]
    more = {"format": "conversational", "on_long_target": "truncate"}
    short = run_of(tmp_path, base, row, length=16, **more)
    _, prompts = short.make_prompts([example.prompt])
    assert prompts.input_ids[0].tolist() == [base.bos_token_id, *whole[-15:]]
