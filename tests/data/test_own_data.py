"""What people bring along: long answers, lost characters, data that change, settings that clash."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from config.errors import ConfigError, UserError
from config.gptj import GPTJConfig
from config.presets import load_config
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.loader import Loader
from data.pipeline import Pipeline
from data.seq2seq import SEQ2SEQ
from data.sources import DataError, source_from_name
from data.tokenizer import warn_truncated_answers
from files.json_files import JsonObject
from modelling.gptj.config_json import from_config_json as gptj_sizes
from modelling.t5.config_json import from_config_json as t5_sizes
from terminal.command_line import read_command_line
from tests.data.corpora import run_tokenizer

CLASSES = {"tiny": (T5Config, SEQ2SEQ), "gptj_tiny": (GPTJConfig, CAUSAL_LM)}


def own(tmp_path: Path, preset: str, rows: list[tuple[str, str]], **data: object) -> Pipeline:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    config_class, shape = CLASSES[preset]
    fields = {"dataset": "sample", "train": str(file), "validation": str(file)} | data
    return Pipeline(load_config(config_class, "finetuning", preset, {"data": fields}), shape)


# ---- lengths ------------------------------------------------------------------------------------
LONG = [("Anna took", "the red lamp " * 20), ("Paul took", "the lamp")]


@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_the_longest_target_of_both_splits_is_named_at_once(tmp_path, preset):
    longer = tmp_path / "longer.jsonl"
    longer.write_text(json.dumps({"prompt": "a", "completion": "the red lamp " * 30}) + "\n")
    data = own(tmp_path, preset, LONG, validation=str(longer))
    texts = ["the red lamp " * 30]
    (needed,) = map(len, data.sample_format.encode_targets(data.config, texts, data.tokenizer))
    limit = data.sample_format.target_token_limit(data.config)
    said = f"{limit.field} is {limit.tokens}: give --{limit.field} {needed} or more"
    with pytest.raises(ConfigError, match=said):
        data.make_training_samples()


def test_no_length_is_proposed_that_the_model_was_not_made_for(tmp_path):
    data = own(tmp_path, "gptj_tiny", LONG, packing=False, loss_on="completion")
    for made_for, said in (
        (62, "give --sequence_length 62 or more, or"),
        (61, "made for 61: give"),
    ):
        model = replace(data.user_config.model, max_position_embeddings=made_for)
        short = replace(data, user_config=replace(data.user_config, model=model))
        with pytest.raises(ConfigError, match=f"{said} --data.on_long_target truncate or skip"):
            short.make_training_samples()


def test_rows_of_empty_texts_are_rows(tmp_path):
    assert len(own(tmp_path, "tiny", [("", "")] * 3).make_training_samples()) == 3


@pytest.mark.parametrize("packing", [True, False])
def test_targets_that_validation_would_refuse_are_refused_before_training(tmp_path, packing):
    data = own(tmp_path, "gptj_tiny", LONG, packing=packing, loss_on="completion")
    with pytest.raises(ConfigError, match="has 62 tokens .* is 32: give --sequence_length 62 or"):
        data.make_training_samples()


def test_a_language_model_keeps_the_prompts_of_targets_that_were_cut(tmp_path):
    data = own(
        tmp_path, "gptj_tiny", LONG, packing=False, loss_on="completion", on_long_target="truncate"
    )
    samples = data.make_training_samples()
    assert samples.truncation_counts.targets == 1
    labels = samples.take(np.arange(2))["labels"]
    assert labels[0][labels[0] >= 0][-1] == data.tokenizer.eos_token_id
    dropped = own(tmp_path, "gptj_tiny", LONG, packing=False, on_long_target="skip")
    assert len(dropped.make_training_samples()) == 1


@pytest.mark.parametrize(("preset", "given"), [("tiny", 4), ("gptj_tiny", 5)])
def test_the_limit_of_a_preset_belongs_to_its_task(tmp_path, preset, given):
    data = own(tmp_path, preset, LONG[1:])
    assert (
        data.sample_format.max_new_tokens(data.user_config)
        == data.user_config.model.sequence_length
        > given
    )
    sample = replace(
        data.user_config, data=replace(data.user_config.data, train=None, validation=None)
    )
    assert data.sample_format.max_new_tokens(sample) < 8
    few = replace(data.user_config, generation=replace(data.user_config.generation, max_tokens=3))
    assert data.sample_format.max_new_tokens(few) == 3


def test_answers_that_were_cut_are_counted(capsys):
    tokenizer = run_tokenizer()
    end = tokenizer.eos_token_id
    warn_truncated_answers(np.array([[5, 6, end], [5, 6, 7], [end, 0, 0]]), tokenizer)
    assert "1 of 3 answers were cut at 3 tokens" in capsys.readouterr().err


# ---- characters ---------------------------------------------------------------------------------
def test_characters_that_the_tokenizer_loses_are_named(tmp_path, capsys):
    rows = [("Anna ☃\nwent", "Paul")]
    own(tmp_path, "tiny", rows).make_training_samples()
    said = capsys.readouterr().err
    assert r"warning: the tokenizer does not know '\n', '☃'" in said
    own(tmp_path, "gptj_tiny", rows * 20).make_training_samples()
    assert "does not know" not in capsys.readouterr().err


def test_letters_that_the_tokenizer_makes_small_are_named(tmp_path, capsys):
    data = own(tmp_path, "tiny", [("Anna WENT up to Paul", "it")] * 3)
    backend = data.tokenizer.hf_tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    data.make_training_samples()
    said = capsys.readouterr().err
    assert "does not know" not in said
    assert "the tokenizer reads 'A', 'E', 'N', 'P', 'T' and others as small letters" in said
    assert "the model will not write them" in said


# ---- rows that are held out ---------------------------------------------------------------------
@pytest.mark.parametrize(("preset", "fraction"), [("tiny", "0.1"), ("gptj_tiny", "0.25")])
def test_the_rows_that_a_fraction_holds_out_are_counted(tmp_path, preset, fraction, capsys):
    rows = [(f"Anna took {i}", "lamp") for i in range(80)]
    data = own(tmp_path, preset, rows, validation=fraction)
    data.make_training_samples()
    said = capsys.readouterr().err
    held_out = len(data.read_corpus("validation").examples)
    assert 80 * float(fraction) / 3 < held_out < 80 * float(fraction) * 2
    assert f", {held_out} held out by --data.validation {fraction}" in said
    assert f"{80 - held_out} " in said
    own(tmp_path, preset, rows).make_training_samples()
    assert "held out" not in capsys.readouterr().err


# ---- data that change ---------------------------------------------------------------------------
@pytest.mark.parametrize("preset", CLASSES)
def test_a_run_continues_with_the_same_content_alone(tmp_path, preset):
    rows = [(f"Anna took {word}", word) for word in ("lamp", "kite", "hat", "clock")] * 5

    def loader(rows: list[tuple[str, str]]) -> Loader:
        return Loader(own(tmp_path, preset, rows).make_training_samples(), 2, seed=0)

    state = loader(rows).state()
    loader(rows).restore(state)
    with pytest.raises(ValueError, match=r"other training data.*load_optimizer false"):
        loader([*rows[:-1], ("Anna took clock", "hat")]).restore(state)


# ---- configurations -----------------------------------------------------------------------------
def test_patience_watches_a_metric_that_is_computed():
    config = T5Config.from_dict({"eval": {"steps": 2, "patience": 1, "metrics": "bleu"}})
    assert config.best_metric == "loss"
    assert T5Config().best_metric is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_weights_of_16_bits_lose_no_small_updates_by_default(precision):
    config = T5Config.from_dict({"model": {"precision": precision}})
    assert config.rounds_stochastically == (precision != "float32")
    off = {"model": {"precision": precision}, "training": {"stochastic_rounding": False}}
    assert not T5Config.from_dict(off).rounds_stochastically


T5_JSON = {
    "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "vocab_size": 64,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
}  # fmt: skip
GPTJ_JSON = {"n_embd": 8, "n_layer": 1, "n_head": 2, "rotary_dim": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("sizes", "hf_config", "more", "named"),
    [
        (t5_sizes, T5_JSON, {"is_encoder_decoder": False}, "is_encoder_decoder"),
        (t5_sizes, T5_JSON, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (t5_sizes, T5_JSON, {"dense_act_fn": "silu"}, "dense_act_fn"),
        (gptj_sizes, GPTJ_JSON, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (gptj_sizes, GPTJ_JSON, {"resid_pdrop": 0.1}, "embd_pdrop"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(sizes, hf_config, more, named):
    sizes(JsonObject(hf_config, "config.json"))
    with pytest.raises(ConfigError, match=f"config.json has {named} "):
        sizes(JsonObject(hf_config | more, "config.json"))


def test_dropout_is_that_of_config_json():
    found = t5_sizes(JsonObject(T5_JSON | {"dropout_rate": 0.3}, "config.json"))
    assert found["dropout_prob"] == 0.3
    all_alike = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    assert gptj_sizes(JsonObject(GPTJ_JSON | all_alike, "config.json"))["dropout_prob"] == 0.2


# ---- files --------------------------------------------------------------------------------------
def test_a_json_array_has_rows(tmp_path):
    (tmp_path / "r.json").write_text('[{"prompt": "a", "completion": "b"}]')
    ((place, row),) = source_from_name(str(tmp_path / "r.json"), "train").read_rows()
    assert str(place).endswith("r.json, row 0")
    assert row == {"prompt": "a", "completion": "b"}
    (tmp_path / "r.json").write_text('{"prompt": "a"}')
    (one,) = source_from_name(str(tmp_path / "r.json"), "train").read_rows()
    assert one[1] == {"prompt": "a"}
    (tmp_path / "r.json").write_text('"a"')
    with pytest.raises(DataError, match="must be an array of objects"):
        list(source_from_name(str(tmp_path / "r.json"), "train").read_rows())


@pytest.mark.parametrize("name", ["nope.json", "nope.txt", "nope.jsonl.gz"])
def test_a_missing_file_is_not_a_data_set_of_the_hub(name):
    with pytest.raises(UserError, match=rf"{name}"):
        list(source_from_name(name, "train").read_rows())


NUMBERS = [
    *("0x" + "f" * 100_000, "0b" + "1" * 100_000, "0" + "7" * 100_000, "0o" + "7" * 100_000),
    *("9" * 100_000, "-0x" + "f" * 100_000, "1:" * 2000 + "1", "1_" * 50_000 + "1", "0b", "0o8"),
    *("9" * 4300, "9" * 4301, "1e" + "9" * 5000, "1" * 100_000 + ".5", "0x" + "f" * 16),
]
"""In every base and notation: Python reads 4,300 decimal digits."""


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number[:4]}-{len(number)}")
def test_numbers_of_many_digits_are_one_sentence(tmp_path, number):
    places = ["model: {layers: %s}", "model: {dropout_prob: %s}", "model: {%s: 1}", "training: %s"]
    for place in places:
        (tmp_path / "c.yml").write_text(f"family: t5\n{place % number}")
        with pytest.raises(ConfigError) as error:
            load_config(T5Config, "finetuning", str(tmp_path / "c.yml"))
        assert len(str(error.value)) < 300
    for flag in ("--layers", "--dropout_prob", "--precision"):
        with pytest.raises(ConfigError) as error:
            read_command_line("", "finetuning", "tiny", [f"{flag}={number}"])
        assert len(str(error.value)) < 300
