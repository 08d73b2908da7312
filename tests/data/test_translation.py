"""Translations: rows, languages, tokens; the reference is transformers."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq
from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right as shift_m2m
from transformers.models.marian.modeling_marian import shift_tokens_right as shift_marian
from transformers.models.mbart.modeling_mbart import shift_tokens_right as shift_mbart

from config.bart import BartConfig
from config.errors import UserError
from config.sections import Data
from config.task import Seq2SeqData
from data.examples import Example, LanguageError, Languages, TokenizedText
from data.mixture import read_mixture
from data.pipeline import Pipeline
from data.samples import IGNORE_INDEX
from data.seq2seq import SEQ2SEQ, encode_examples, truncate_examples
from data.sources import DataError
from data.task import SAMPLE_FOLDER, check_task_and_files, task_from_config
from data.token_store import TokenStore, read_token_store
from data.tokenizer import Tokenizer, add_tokens
from files.file_location import FileLocation
from huggingface.hub import load_tokenizer
from tests.data.translation_tokenizers import ENGLISH, GERMAN, LANGUAGES, write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

LENGTH = 40
WITH_CODES = ("nllb", "m2m_100", "mbart50", "mbart")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in LANGUAGES:
        write_tokenizer(name, folder / name)
    return {name: folder / name for name in LANGUAGES}


def hf_pairs(
    folder: Path, pairs: Sequence[tuple[str, str]], languages: Languages, length: int | None = None
) -> tuple[Any, list[dict[str, Any]]]:
    """Sources and labels of transformers' own tokenizer."""
    hf = AutoTokenizer.from_pretrained(folder)
    hf.src_lang, hf.tgt_lang = languages
    texts = [{"text": source, "text_target": target} for source, target in pairs]
    cut = {} if length is None else {"truncation": True, "max_length": length}
    return hf, [dict(hf(**pair, **cut)) for pair in texts]


# ---- tokens -------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [None, 7], ids=["whole", "cut"])
@pytest.mark.parametrize("name", LANGUAGES)
def test_sources_and_labels_are_those_of_transformers(
    name: str, length: int | None, folders: dict[str, Path]
) -> None:
    languages, pairs = Languages(*LANGUAGES[name]), list(zip(ENGLISH, GERMAN, strict=True))
    prefix = ">>deu<< " if name == "marian_multilingual" else ""
    marked = [(prefix + source, target) for source, target in pairs]
    hf, features = hf_pairs(folders[name], marked, languages, length)
    batch = DataCollatorForSeq2Seq(hf, padding="max_length", max_length=LENGTH)(
        [{n: f[n] for n in ("input_ids", "labels")} for f in features], return_tensors="np"
    )
    examples = [Example(*pair, languages=languages) for pair in pairs]
    tokenizer = Tokenizer(load_tokenizer(str(folders[name])))
    tokens = list(encode_examples(examples, tokenizer))
    encoded = truncate_examples(
        tokens, examples, tokenizer, length or LENGTH, length or LENGTH, "truncate"
    )
    ours = encoded.take(range(len(pairs)))
    width = length or LENGTH
    np.testing.assert_array_equal(ours["input_ids"], batch["input_ids"][:, :width])
    labels = np.full((len(pairs), LENGTH), IGNORE_INDEX)
    labels[:, : batch["labels"].shape[1]] = batch["labels"]
    np.testing.assert_array_equal(ours["labels"], labels[:, :width])
    known = hf.unk_token_id if name != "marian_two_vocabularies" else -1
    assert known not in ours["labels"]


@pytest.mark.parametrize("name", WITH_CODES)
def test_each_row_has_its_languages(name: str, folders: dict[str, Path]) -> None:
    """Rows of both directions, mixed: each is as if it were alone, and nothing is left behind."""
    english, german = LANGUAGES[name]
    rng, tokenizer = random.Random(1), Tokenizer(load_tokenizer(str(folders[name])))
    state = tokenizer.identity_values
    examples = [Example(*pair, languages=Languages(english, german))
                for pair in zip(ENGLISH, GERMAN, strict=True)]  # fmt: skip
    examples += [
        Example(e.target, e.prompt, languages=Languages(german, english)) for e in examples
    ]
    rng.shuffle(examples)
    together = [text.ids.tolist() for text in encode_examples(examples, tokenizer)]
    alone = [next(encode_examples([e], tokenizer)).ids.tolist() for e in examples]
    assert together == alone
    assert tokenizer.identity_values == state
    assert len({tuple(ids) for ids in together}) == len(examples)


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_translation_is_decoded_without_its_language(name: str, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(load_tokenizer(str(folders[name])))
    languages = Languages(*LANGUAGES[name])
    targets = list(tokenizer.encode_side([(text, languages) for text in GERMAN], True))
    assert tokenizer.decode(targets) == list(GERMAN)
    assert tokenizer.find_lost_characters([*ENGLISH, *GERMAN]) == ([], [])
    assert tokenizer.find_lost_characters(["Anna 大"]) == (["大"], [])


@pytest.mark.parametrize("name", WITH_CODES)
def test_every_code_has_a_row(name: str, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(load_tokenizer(str(folders[name])))
    assert tokenizer.language_codes is not None
    ids = tokenizer.language_codes.token_ids
    assert {*LANGUAGES[name]} <= ids.keys()
    assert max(ids.values()) < tokenizer.required_vocab_size
    assert tokenizer.language_codes.are_suffixes == (name == "mbart")
    assert tokenizer.num_end_tokens == 1 + (name == "mbart")


def test_tokenizers_of_one_language_have_no_codes(folders: dict[str, Path]) -> None:
    for folder in (folders["marian"], SAMPLE_FOLDER / "t5_tokenizer"):
        assert Tokenizer(load_tokenizer(str(folder))).language_codes is None


def test_marians_targets_have_their_own_pieces(folders: dict[str, Path], tmp_path: Path) -> None:
    """The digest of the tokenizer knows both models."""
    one = Tokenizer(load_tokenizer(str(folders["marian"])))
    other = shutil.copytree(folders["marian"], tmp_path / "other")
    shutil.copy(other / "source.spm", other / "target.spm")
    assert one.identity_values != Tokenizer(load_tokenizer(str(other))).identity_values
    source, target = (next(one.encode_side([(GERMAN[1], Languages())], side)) for side in (0, 1))
    assert len(target) < len(source)


# ---- what is wrong ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "language", "advice"),
    [
        ("nllb", "en", "did you mean eng_Latn?"),
        ("nllb", "eng", "did you mean eng_Latn?"),
        ("nllb", "zzz", "it has: eng_Latn, deu_Latn, fra_Latn"),
        ("mbart50", "de", "did you mean de_DE?"),
        ("m2m_100", "deu_Latn", "did you mean de?"),
    ],
)
def test_an_unknown_language_is_named_with_close_ones(
    name: str, language: str, advice: str, folders: dict[str, Path]
) -> None:
    tokenizer = Tokenizer(load_tokenizer(str(folders[name])))
    example = Example("a", "b", languages=Languages(language, LANGUAGES[name][1]))
    with pytest.raises(LanguageError, match=re.escape(f"no language '{language}'; {advice}")):
        list(encode_examples([example], tokenizer))


def test_a_missing_language_is_asked_for(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(load_tokenizer(str(folders["nllb"])))
    with pytest.raises(LanguageError, match="give --data.target_language, such as eng_Latn"):
        list(encode_examples([Example("a", "b", languages=Languages("eng_Latn"))], tokenizer))


def test_languages_in_the_tokenizers_files_count(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["nllb"], tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"src_lang": "deu_Latn", "tgt_lang": "eng_Latn"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(load_tokenizer(str(folder)))
    found = next(encode_examples([Example("a", "b")], tokenizer)).ids
    languages = Languages("deu_Latn", "eng_Latn")
    expected = next(encode_examples([Example("a", "b", languages=languages)], tokenizer)).ids
    np.testing.assert_array_equal(found, expected)


def test_marian_of_several_targets_knows_its_own(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(load_tokenizer(str(folders["marian_multilingual"])))
    with pytest.raises(LanguageError, match="no language 'de'; it has: deu, fra"):
        list(encode_examples([Example("a", "b", languages=Languages("en", "de"))], tokenizer))


# ---- rows ---------------------------------------------------------------------------------------
PAIR = {"en": "Hello", "de": "Hallo"}


def examples_of(tmp_path: Path, rows: Sequence[Any], **settings: Any) -> list[Example]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return list(task_from_config(Data(train=str(file), **settings)).read_corpus("train").examples)


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"translation": PAIR}, {"source_language": "en", "target_language": "de"}),
        ({"id": 1, "translation": PAIR}, {"source_language": "en_XX", "target_language": "de_DE"}),
        (PAIR, {"source_language": "en", "target_language": "de"}),
        (
            {"translation": PAIR},
            {"prompt": "{en}", "target": "{de}", "source_language": "eng_Latn",
             "target_language": "deu_Latn"},
        ),
        ({"source": "Hello", "target": "Hallo", "source_language": "en", "target_language": "de"},
         {}),
        ({"source": "Hello", "target": "Hallo", "src_lang": "en", "tgt_lang": "de"}, {}),
        ({"source": "Hello", "target": "Hallo", "source_lang": "x", "target_lang": "de"},
         {"source_language": "en"}),
        ({"prompt": "Hello", "completion": "Hallo", "from": "en", "to": "de"},
         {"source_language": "{from}", "target_language": "{to}"}),
    ],
)  # fmt: skip
def test_rows_that_people_have(tmp_path: Path, row: Any, settings: dict[str, str]) -> None:
    (example,) = examples_of(tmp_path, [row], **settings)
    assert (example.prompt, example.target) == ("Hello", "Hallo")
    assert [language[:2] for language in example.languages if language] == ["en", "de"]


def test_a_table_with_a_column_for_each_language(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("en\tde\nHello\tHallo\n")
    data = Data(train=str(tmp_path / "rows.tsv"), source_language="de", target_language="en")
    (example,) = task_from_config(data).read_corpus("train").examples
    assert example == Example("Hallo", "Hello", languages=Languages("de", "en"))


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"translation": PAIR}, {}, "the columns are en, de"),
        ({"translation": PAIR}, {"source_language": "fr", "target_language": "de"},
         "the columns are en, de"),
        ({"translation": PAIR}, {"source_language": "en", "target_language": "en"},
         "are both en: a translation has two languages"),
        ({"source": "a", "target": "b", "src_lang": "en", "tgt_lang": "en"}, {},
         "are both in 'en': a translation has two languages"),
        ({"source": "a", "target": "b"}, {"source_language": "{lang}"},
         "there is no column 'lang', but: source, target"),
        ({"translation": {"en": "a", "de": None}},
         {"source_language": "en", "target_language": "de"}, "--data.on_null skip"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_rows_is_said(
    tmp_path: Path, row: Any, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        examples_of(tmp_path, [row], **settings)


# ---- parallel files -----------------------------------------------------------------------------
def write_parallel(folder: Path, *texts: str) -> str:
    names = [str(folder / f"train.{language}") for language in ("en", "de")]
    for name, text in zip(names, texts, strict=True):
        Path(name).write_text(text, "utf-8")
    return "+".join(names)


def test_two_files_are_read_line_by_line(tmp_path: Path) -> None:
    names = write_parallel(tmp_path, "One\u2028a\n\nThree", "Eins\r\n\r\nDrei\r\n")
    data = Data(train=names, source_language="en", target_language="de", on_null="skip")
    corpus = task_from_config(data).read_corpus("train")
    assert [example[:2] for example in corpus.examples] == [
        ("One\u2028a", "Eins"),
        ("Three", "Drei"),
    ]
    assert corpus.nulls == 1
    assert str(corpus.row_location(1)).endswith("train.en, line 3")


def test_parallel_files_can_be_several_and_gzipped(tmp_path: Path) -> None:
    names = write_parallel(tmp_path, "One\n", "Eins\n")
    for language, text in (("en", "Two\n"), ("de", "Zwei\n")):
        (tmp_path / f"more.{language}.gz").write_bytes(gzip.compress(text.encode()))
    data = Data(train=f"{names}, {tmp_path}/more.en.gz+{tmp_path}/more.de.gz")
    examples = task_from_config(data).read_corpus("train").examples
    assert [example[:2] for example in examples] == [("One", "Eins"), ("Two", "Zwei")]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("One\nTwo\n", "Eins\n"), "train.de has 1 lines, but"),
        (("One\n", "Eins\nZwei\n"), "train.en has 1 lines, but"),
        (("One\n\n", "Eins\nZwei\n"), "holds null, but must hold text"),
    ],
)
def test_lines_without_a_translation_are_named(
    tmp_path: Path, texts: tuple[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        task_from_config(Data(train=write_parallel(tmp_path, *texts))).read_corpus("train")


@pytest.mark.parametrize("names", ["a.en+", "a+b+c", "a.en+b.de,c.jsonl"])
def test_a_name_that_is_no_pair_is_refused(names: str) -> None:
    with pytest.raises(DataError, match="must be two files of text"):
        task_from_config(Data(train=names))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    names = write_parallel(tmp_path, "One\n", "Eins\n") + "x"
    with pytest.raises(UserError, match="train.dex"):
        check_task_and_files(Data(train=names))


def test_a_mixture_finds_parallel_files_beside_it(tmp_path: Path) -> None:
    write_parallel(tmp_path, "One\n", "Eins\n")
    (tmp_path / "mixture.yml").write_text(
        "a: {train: train.en+train.de, source_language: en, target_language: de}\n"
        "b: {train: train.de+train.en, source_language: de, target_language: en}\n"
    )
    sources = read_mixture(Data(train=str(tmp_path / "mixture.yml")))
    rows = [task_from_config(source.data).read_corpus("train").examples[0] for source in sources]
    assert rows == [
        Example("One", "Eins", languages=Languages("en", "de")),
        Example("Eins", "One", languages=Languages("de", "en")),
    ]


# ---- pipelines ----------------------------------------------------------------------------------
def pipeline_of(name: str, folders: dict[str, Path], tmp_path: Path, **settings: Any) -> Pipeline:
    """Rows of both directions, or, with languages in the settings, of one."""
    file = tmp_path / "rows.jsonl"
    english, german = LANGUAGES[name]
    with file.open("w") as rows:
        for source, target in zip(ENGLISH, GERMAN, strict=True):
            row = {"source": source, "target": target}
            print(json.dumps({**row, "src_lang": english, "tgt_lang": german}), file=rows)
            swapped = {"source": target, "target": source, "src_lang": german, "tgt_lang": english}
            if not settings:
                print(json.dumps(swapped), file=rows)
    data = Seq2SeqData(
        train=str(file), validation=str(file), tokenizer=str(folders[name]), **settings
    )
    config = BartConfig(data=data)
    return Pipeline(
        replace(config, model=replace(config.model, vocab_size=400, sequence_length=LENGTH)),
        SEQ2SEQ,
    )


@pytest.mark.parametrize("name", ["nllb", "m2m_100", "mbart50"])
def test_answers_begin_with_the_language_of_their_row(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    data = pipeline_of(name, folders, tmp_path)
    corpus = data.read_corpus("validation")
    _, prompts = data.make_eval_prompts(corpus)
    codes = data.tokenizer.language_codes
    assert codes is not None
    assert prompts.forced_tokens is not None
    expected = [codes.token_ids[str(e.languages.target)] for e in corpus.examples]
    assert prompts.forced_tokens.tolist() == expected
    labels = data.make_samples(corpus).take(np.arange(len(corpus.examples)))["labels"]
    assert labels[:, 0].tolist() == expected


@pytest.mark.parametrize("name", WITH_CODES)
def test_one_language_for_all_is_the_models_setting(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    english, german = LANGUAGES[name]
    settings = {"source_language": english, "target_language": german}
    data = pipeline_of(name, folders, tmp_path, **settings)
    config, prompts = data.make_eval_prompts(data.read_corpus("validation"))
    assert prompts.forced_tokens is None
    codes = data.tokenizer.language_codes
    assert codes is not None
    code = codes.token_ids[german]
    for model in (config.model, data.config.model):
        tokens = model.start_token_id, model.forced_token_ids[0]
        assert tokens == ((code, None) if name == "mbart" else (2, code))
    _, other = data.make_prompts(["Hallo"], [Languages(german, english)])
    first_code = other.input_ids[0][0 if name != "mbart" else other.mask[0].sum() - 1]
    assert first_code == codes.token_ids[german]


def test_answers_in_several_languages_need_codes_that_begin_them(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    data = pipeline_of("mbart", folders, tmp_path)
    with pytest.raises(UserError, match="answers in de_DE, en_XX are asked for"):
        data.make_eval_prompts(data.read_corpus("validation"))


def test_languages_survive_the_token_cache(tmp_path: Path) -> None:
    store, languages = TokenStore(), [Languages("en", "de"), Languages(), Languages("en", "de")]
    tokens = TokenizedText(np.zeros(2, np.int32), np.ones(2, bool))
    for i, pair in enumerate(languages):
        store.add_example(FileLocation("a", i), Example("x", "y", languages=pair), tokens)
    store.write_columns(tmp_path / "f", {"unlabeled": 0, "nulls": 0, "characters": "", "notes": {}})
    corpus, _ = read_token_store(tmp_path / "f")
    assert [example.languages for example in corpus.examples] == languages


SHIFTS: dict[str, tuple[str, Any]] = {
    "nllb": ("m2m_100", lambda labels, pad: shift_m2m(labels, pad, 2)),
    "m2m_100": ("m2m_100", lambda labels, pad: shift_m2m(labels, pad, 2)),
    "mbart50": ("mbart", shift_mbart),
    "mbart": ("mbart", shift_mbart),
    "marian": ("marian", lambda labels, pad: shift_marian(labels, pad, pad)),
}
"""Model type of each tokenizer, and how transformers' model makes decoder inputs of labels."""


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("examples_per_sample", [1, 4])
def test_decoder_inputs_are_those_of_transformers(
    name: str, examples_per_sample: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also of packed samples, whose empty places have no labels."""
    data = pipeline_of(name, folders, tmp_path)
    model_type, shift = SHIFTS[name]
    pad = data.tokenizer.pad_token_id
    start = pad if model_type == "marian" else 2
    values: dict[str, Any] = {
        "model.model_type": model_type, "model.decoder_start_token_id": start,
        "data.examples_per_sample": examples_per_sample, "model.sequence_length": 64,
    }  # fmt: skip
    data = replace(data, user_config=data.user_config.with_values(values))
    samples = data.make_samples(data.read_corpus("train"))
    batch = samples.take(np.arange(len(samples)))
    has_labels = (batch["labels"] != IGNORE_INDEX).any(axis=1)
    assert has_labels.sum() == 2 * len(ENGLISH)
    expected = shift(torch.tensor(batch["labels"][has_labels]), pad).numpy()
    np.testing.assert_array_equal(batch["decoder_input_ids"][has_labels], expected)
    assert (batch["decoder_input_ids"][~has_labels][:, 1:] == pad).all()


@pytest.mark.parametrize("name", ["nllb", "mbart50", "mbart"])
def test_an_added_token_is_a_language(name: str, folders: dict[str, Path]) -> None:
    """Such as one that NLLB was not trained on."""
    hf = load_tokenizer(str(folders[name]))
    add_tokens(hf, ["gsw_Latn"])
    tokenizer, languages = Tokenizer(hf), Languages(LANGUAGES[name][0], "gsw_Latn")
    (example,) = encode_examples([Example("Hello", "Hallo", languages=languages)], tokenizer)
    code = hf.convert_tokens_to_ids("gsw_Latn")
    target = example.ids[example.loss_mask]
    assert target[-1 if name == "mbart" else 0] == code == len(hf) - 1
    assert tokenizer.decode([target]) == ["Hallo"]


@pytest.mark.parametrize(("name", "is_said"), [("marian", True), ("marian_multilingual", False)])
def test_languages_that_the_tokenizer_does_not_use_are_said(
    name: str, is_said: bool, folders: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    settings = dict(zip(("source_language", "target_language"), LANGUAGES[name], strict=True))
    pipeline_of(name, folders, tmp_path, **settings).make_training_samples()
    assert ("the tokenizer has no language codes" in capsys.readouterr().err) == is_said


def test_a_row_in_an_unknown_language_is_located(folders: dict[str, Path], tmp_path: Path) -> None:
    data = pipeline_of("nllb", folders, tmp_path)
    file = tmp_path / "rows.jsonl"
    lines = file.read_text().splitlines()
    lines[2] = lines[2].replace("deu_Latn", "ger")
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: the tokenizer has no language 'ger'"):
        data.make_training_samples()
    flags = {"source_language": "eng_Latn", "target_language": "ger"}
    with pytest.raises(UserError, match="^the tokenizer has no language 'ger'"):
        pipeline_of("nllb", folders, tmp_path, **flags).make_training_samples()
