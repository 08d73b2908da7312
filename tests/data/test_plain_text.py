"""Documents: read in parts, the tokens of the whole, all learned; folders of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer as Bare
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from config.errors import UserError
from config.gptj import GPTJConfig
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.document_chunks import CHUNK_CHARACTERS, split_into_chunks
from data.length_stats import measure_lengths
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from data.task import SAMPLE_FOLDER, task_from_config
from data.tokenizer import Tokenizer
from run.evaluation.evaluator import resolve_metrics
from tests.data.corpora import run_tokenizer

TOKENIZER = str(SAMPLE_FOLDER / "gptj_tokenizer")
PROSE = "".join(
    f"Anna took lamp {n} to the garden.\n{'  Then' if n % 3 else ''} Paul, naïve ☃, left.\n\n" * 2
    for n in range(400)
)


def run_of(train: Path, length: int = 64, **data: Any) -> Pipeline:
    model = {"eos_token_id": 0, "pad_token_id": 1, "embedding": {"vocab_size": 640}}
    given = {
        "model": model | {"sequence_length": length},
        "data": {"train": str(train), "tokenizer": TOKENIZER, **data},
    }
    return Pipeline(GPTJConfig.from_dict(given), CAUSAL_LM)


def make_token_stream(data: Pipeline) -> tuple[list[int], list[int]]:
    """All tokens that samples read, and all that they predict."""
    samples = data.make_training_samples()
    batch = samples.take(np.arange(len(samples)))
    there = batch["segment_ids"].astype(bool)
    assert (batch["labels"][~there] == -100).all()
    return batch["input_ids"][there].tolist(), batch["labels"][there].tolist()


def llama_tokenizer() -> Tokenizer:
    """Like Llama 2's: spaces are letters, one is put first, bytes stand for unknown letters."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    bare = Bare(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bare.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *byte_tokens]
    bare.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # tokens are within words
    lines = PROSE[:4000].splitlines()
    bare.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    described = json.loads(bare.to_str())
    described["pre_tokenizer"] = None
    described["added_tokens"] = described["added_tokens"][:3]
    bare = Bare.from_str(json.dumps(described))
    bare.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    bare.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=bare, **names))


# ---- parts --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "a" * 3 * CHUNK_CHARACTERS,
        "word " * CHUNK_CHARACTERS,
        "\n" * 3 * CHUNK_CHARACTERS,
        "short",
        "好" * 2 * CHUNK_CHARACTERS,
        "",
    ],
    ids=["prose", "letters", "words", "lines", "short", "chinese", "empty"],
)
@pytest.mark.parametrize("piece", [100, CHUNK_CHARACTERS, 10**9])
def test_the_parts_of_a_document_are_the_document(text, piece):
    found = list(split_into_chunks(text[i : i + piece] for i in range(0, len(text), piece)))
    assert "".join(part for part, _ in found) == text
    assert [where.is_last for _, where in found] == [*[False] * (len(found) - 1), True][
        : len(found)
    ]
    whole = ""
    for part, where in found:
        assert len(part) <= CHUNK_CHARACTERS + 1
        assert whole.endswith(where.context)
        assert bool(where.context) == bool(whole)
        whole += part


@pytest.mark.parametrize(
    "tokenizer", [run_tokenizer("gptj"), llama_tokenizer()], ids=["gptj", "llama"]
)
def test_tokens_of_parts_are_those_of_the_whole(tokenizer):
    found = list(tokenizer.encode_doc_chunks(split_into_chunks([PROSE])))
    assert len(found) > 5
    ids = np.concatenate([tokens.ids for tokens in found]).tolist()
    assert ids == [*tokenizer.hf_tokenizer(PROSE)["input_ids"], tokenizer.eos_token_id]
    assert all(tokens.loss_mask.all() for tokens in found)


@pytest.mark.parametrize(
    "tokenizer", [run_tokenizer("gptj"), llama_tokenizer()], ids=["gptj", "llama"]
)
def test_nothing_is_lost_where_there_is_no_place_to_cut(tokenizer):
    text = "".join("好é☃ab"[i * i % 5] for i in range(3 * CHUNK_CHARACTERS))
    ids = np.concatenate(
        [tokens.ids for tokens in tokenizer.encode_doc_chunks(split_into_chunks([text]))]
    )
    assert (
        tokenizer.hf_tokenizer.decode(ids, skip_special_tokens=True)
        .replace(" ", "")
        .replace("▁", "")
        == text
    )


# ---- samples ------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["txt", "gz", "text column", "documents", "folder"])
def test_all_tokens_are_learned_and_nothing_goes_between_samples(tmp_path, form):
    base = run_tokenizer("gptj").hf_tokenizer
    documents = [PROSE] if form in ("txt", "gz") else [PROSE[:20000], "Anna left.", PROSE[:77]]
    path = tmp_path / "corpus"
    if form == "txt":
        path = tmp_path / "corpus.txt"
        path.write_text(PROSE)
    elif form == "gz":
        path = tmp_path / "corpus.txt.gz"
        path.write_bytes(gzip.compress(PROSE.encode()))
    elif form == "folder":
        for n, document in enumerate(documents):
            (path / f"{n}").mkdir(parents=True)
            (path / f"{n}" / "a.txt").write_text(document)
        (path / "README.md").write_text("not this")
    else:
        path = tmp_path / "rows.jsonl"
        more = {"id": 3} if form == "documents" else {}
        path.write_text("".join(json.dumps({"text": d} | more) + "\n" for d in documents))
    data = run_of(
        path,
        loss_on="completion",
        **({"format": "language_modeling"} if form == "documents" else {}),
    )
    read, predicted = make_token_stream(data)
    whole = [token for document in documents for token in [*base(document)["input_ids"], 0]]
    assert (read, predicted) == (whole[:-1], whole[1:])
    assert data.config.data.format == "language_modeling"


def test_another_column_can_be_the_document(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"title": "a", "body": "Anna left."}) + "\n")
    read, _ = make_token_stream(run_of(file, format="language_modeling", target="{title}: {body}"))
    assert run_tokenizer("gptj").decode([read]) == ["a: Anna left."]


def test_saved_data_sets_are_read_and_other_splits_named(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["Anna left.", "Paul left."]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    one, several = (
        task_from_config(run_of(tmp_path / n).user_config.data) for n in ("one", "several/test")
    )
    assert [e.target for e in one.read_corpus("train").examples] == ["Anna left.", "Paul left."]
    assert one.read_corpus("train").examples == several.read_corpus("train").examples
    with pytest.raises(UserError, match="has no split train, but test: name one, such as .*/test"):
        run_of(tmp_path / "several").read_corpus("train")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(UserError, match="holds no data set that datasets can load"):
        run_of(tmp_path / "one").read_corpus("train")


@pytest.mark.parametrize(
    ("files", "said"),
    [([], "holds no data: it must"), (["a.txt", "b.jsonl"], r"of the kinds .jsonl, .txt: name")],
)
def test_folders_that_do_not_say_what_is_meant(tmp_path, files, said):
    for name in files:
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=said):
        run_of(tmp_path).read_corpus("train")


def test_an_encoder_decoder_says_that_it_learns_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE)
    given = T5Config.from_dict({"data": {"train": str(tmp_path / "a.txt")}})
    with pytest.raises(UserError, match="plain text is for models with a decoder alone"):
        Pipeline(given, SEQ2SEQ).make_training_samples()


def test_a_fraction_holds_out_parts(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE)
    data = run_of(tmp_path / "a.txt", validation="0.3")
    train, held_out = (data.read_corpus(split).examples for split in ("train", "validation"))
    assert train
    assert held_out
    assert sorted(e.target for e in [*train, *held_out]) == sorted(
        t for t, _ in split_into_chunks([PROSE])
    )
    samples = data.make_samples(data.read_corpus("validation"), for_eval=True)
    assert (samples.take([0])["labels"] >= 0).all()
    assert resolve_metrics(data.config, data.task) == ("loss", "perplexity")


def test_samples_of_documents_are_as_long_as_usual(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE)
    data = run_of(tmp_path / "a.txt")
    tokens = sum(len(t.ids) for t in data.read_tokenized_corpus("train").tokens or ())
    found = measure_lengths(data, ["train"])
    assert (found.longest, found.target, found.examples * found.mean) == (1024, 256, tokens)
