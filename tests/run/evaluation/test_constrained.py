"""Answers among labels, by their likelihoods, beside transformers' and scikit-learn's numbers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import run_finetuning
import run_validation
from config.gptj import GPTJConfig
from config.llama import LlamaConfig
from config.presets import load_config
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.data_cache import DataCache
from data.examples import Corpus
from data.label_candidates import LabelCandidates
from data.pipeline import Pipeline
from data.samples import IGNORE_INDEX
from data.seq2seq import SEQ2SEQ
from modelling.model_family import get_family
from planning.config_loader import CONFIG_LOADER
from run.evaluation.predictors import LabelPredictor
from run.evaluation.text_metrics import NO_LABEL, macro_f1
from run.weight_loading import load_weights
from terminal.command_line import read_command_line
from tests.data.chat_templates import TEMPLATES, chat_tokenizer, plain
from tests.data.corpora import sample_tokenizer
from tests.slow import slow
from tests.small_runs import random_model

PRESETS = {"tiny": "t5", "gptj_tiny": "gptj", "qwen3_tiny": "gptj"}


def small(preset: str) -> tuple[str, str]:
    """The flag that makes a model of one layer."""
    return ("--num_hidden_layers" if preset == "qwen3_tiny" else "--layers"), "1"


LABELS = {
    "three": "red lamp,hat,old green box",
    "beginnings": "a hat,a hat and a lamp,lamp,box",
}
"""An odd number of them, and one that begins another."""


def rows_of(folder: Path, names: list[str]) -> str:
    input_ids = "Anna took the lamp to the kitchen . Nina moved a red hat , then slept".split()
    rng = np.random.default_rng(0)
    rows = [
        {"t": " ".join(rng.choice(input_ids, 2 + i)), "l": names[i % len(names)]} for i in range(11)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def reference(model: Any, tokenizer: Any, prompt: str, answer: str, ends: bool) -> float:
    """The log-probability of an answer after a prompt."""
    end = [tokenizer.eos_token_id] if ends else []
    if model.config.is_encoder_decoder:
        read = torch.tensor([tokenizer(prompt).input_ids])
        written = tokenizer(answer, add_special_tokens=False).input_ids + end
        logits = model(input_ids=read, labels=torch.tensor([written])).logits[0]
    else:
        before = tokenizer(prompt.rstrip(" ")).input_ids
        written = tokenizer(prompt + answer).input_ids[len(before) :] + end
        logits = model(torch.tensor([before + written])).logits[0][len(before) - 1 : -1]
    of_tokens = torch.log_softmax(logits.double(), -1)[torch.arange(len(written)), written]
    return float(of_tokens.sum())


@pytest.mark.parametrize(
    ("preset", "labels", "target"),
    [
        ("tiny", "three", "{l}"),
        ("gptj_tiny", "three", "{l}"),
        ("qwen3_tiny", "beginnings", "{l}"),
        *(
            slow(preset, labels, target)
            for preset, labels, target in product(PRESETS, LABELS, ("{l}", " {l}"))
        ),
    ],
)
def test_scores_are_those_of_transformers(preset, labels, target, tmp_path):
    names = LABELS[labels].split(",")
    model = random_model(tmp_path / "model", "--config", preset, *small(preset))
    flags = ["--config", preset, *small(preset), "--micro_batch_size", "4", "--load", str(model)]
    flags += [
        "--data.class_labels",
        LABELS[labels],
        "--data.validation",
        rows_of(tmp_path, names),
        "--data.prompt",
        "say: {t} ",
    ]
    flags += ["--data.target", target, "--eval.constrained"]
    flags += [] if preset == "tiny" else ["--data.separator", ""]
    line = read_command_line("", "inference", "tiny", flags, loader=CONFIG_LOADER)
    family, config = get_family(line.config), line.config
    data = Pipeline(config, family.sample_format, DataCache())
    corpus = data.read_corpus("validation")
    candidates = LabelCandidates.from_examples(data, corpus, data.task.labels)
    weights = load_weights(config, family.weight_map(config)).tensors
    found = LabelPredictor(candidates).scores(weights)
    assert found.shape == (11, len(names))
    kind = AutoModelForSeq2SeqLM if preset == "tiny" else AutoModelForCausalLM
    theirs, base = kind.from_pretrained(model).eval(), sample_tokenizer(PRESETS[preset])
    with torch.no_grad():
        expected = [
            [
                reference(theirs, base, example.prompt, target.format(l=name), labels != "three")
                for name in names
            ]
            for example in corpus.examples
        ]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_run_chooses_among_labels(tmp_path, capsys):
    """Training and validation answer with labels alone, and say how well."""
    names = ["red lamp", "hat"]
    rows = rows_of(tmp_path, names)
    flags = (
        "--data.prompt",
        "say: {t}",
        "--data.target",
        "{l}",
        "--data.class_labels",
        ",".join(names),
    )
    both = ("--data.train", rows, "--data.validation", rows)
    model = ("--config", "tiny", "--layers", "1", "--hidden_size", "32", "--d_ff", "32")
    train = (*model, *flags, *both, "--steps", "2", "--global_batch_size", "4",
             "--micro_batch_size", "4", "--eval.steps", "1", "--eval.constrained",
             "--checkpoint.keep_best", "macro_f1", "--save", str(tmp_path / "run"))  # fmt: skip
    assert run_finetuning.main([*train]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines if "eval_macro_f1" in line]
    assert len(told) == 2
    capsys.readouterr()
    load = ("--load", str(tmp_path / "run"), "--eval.constrained")
    assert run_validation.main([*load, "--micro_batch_size", "4"]) == 0
    report = json.loads((tmp_path / "run" / "eval.json").read_text())
    out = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    confusion = report["confusion"]
    assert all(row[NO_LABEL] == 0 for row in confusion.values())
    pairs = [(e, a) for e, row in confusion.items() for a, n in row.items() for _ in range(n)]
    expected, answers = zip(*pairs, strict=True)
    assert report["accuracy"] == pytest.approx(accuracy_score(expected, answers))
    assert report["macro_f1"] == pytest.approx(f1_score(expected, answers, average="macro"))
    assert out["macro_f1"] == f"{report['macro_f1']:.4f}"
    assert told[-1]["eval_macro_f1"] == pytest.approx(report["macro_f1"])
    assert run_validation.main([*load, "--micro_batch_size", "4", "--eval.metrics", "loss"]) == 0
    assert "eval.constrained is not used: eval.metrics has" in capsys.readouterr().err


@pytest.mark.slow  # another layout
@pytest.mark.parametrize("preset", ["tiny", "qwen3_tiny"])
def test_scores_on_four_devices(preset, tmp_path):
    model = random_model(tmp_path / "model", "--config", preset, *small(preset))
    flags = [
        "--config",
        preset,
        *small(preset),
        "--load",
        str(model),
        "--data.class_labels",
        "a,hat,box",
    ]
    flags += ["--data.validation", rows_of(tmp_path, ["a", "hat"]), "--data.prompt", "say: {t}"]
    flags += ["--data.target", " {l}", "--eval.constrained", "--micro_batch_size", "2"]

    def scores(*more: str) -> np.ndarray:
        line = read_command_line("", "inference", "tiny", [*flags, *more], loader=CONFIG_LOADER)
        family, config = get_family(line.config), line.config
        data = Pipeline(config, family.sample_format, DataCache())
        candidates = LabelCandidates.from_examples(
            data, data.read_corpus("validation"), data.task.labels
        )
        weights = load_weights(config, family.weight_map(config)).tensors
        return LabelPredictor(candidates).scores(weights)

    found = scores("--data_parallel", "2", "--tensor_parallel", "2", "--examples_per_sample", "3")
    np.testing.assert_allclose(found, scores(), atol=2e-4)


@pytest.mark.parametrize("seed", range(6))
def test_macro_f1_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    names = [f"label {i}" for i in range(2 + seed)]
    expected = [str(name) for name in rng.choice(names[: 1 + seed], 40)]
    answers = [str(name) for name in rng.choice([*names, NO_LABEL][: 2 + seed + seed % 2], 40)]
    there = sorted({*expected, *answers} - {NO_LABEL})
    theirs = f1_score(expected, answers, labels=there, average="macro", zero_division=0)
    assert macro_f1(answers, expected) == pytest.approx(theirs)


@pytest.mark.parametrize("template", ["chatml", "qwen3", "thinking"])
@pytest.mark.parametrize("labels", ["hat,lamp,box", "hat,hat and lamp"])
def test_labels_in_a_chat_template(template, labels, tmp_path):
    """The texts are those of conversations with the labels; the label is scored, its end only where
    one begins another."""
    names = labels.split(",")
    chat_tokenizer(plain(TEMPLATES[template])).save_pretrained(tmp_path / "tokenizer")

    def corpus_of(names: list[str]) -> tuple[Pipeline, Corpus]:
        data = {
            "validation": rows_of(tmp_path, names),
            "prompt": "{t}",
            "target": "{l}",
            "class_labels": labels,
            "format": "conversational",
            "tokenizer": str(tmp_path / "tokenizer"),
        }
        model = {"vocab_size": 640, "sequence_length": 128}
        over = {"data": data, "model": model}
        config = load_config(LlamaConfig, "inference", "qwen3_tiny", over)
        pipeline = Pipeline(config, CAUSAL_LM, DataCache())
        return pipeline, pipeline.read_corpus("validation")

    data, corpus = corpus_of(names)
    candidates = LabelCandidates.from_examples(data, corpus, names)
    stream = candidates.samples.samples.stream
    units = [slice(*pair) for pair in zip(stream.offsets[:-1], stream.offsets[1:], strict=True)]
    each = len(names) + len(names) % 2
    for index, name in enumerate(names):
        whole, of_label = corpus_of([name])
        expected = whole.tokenize_examples(of_label.examples)
        for example, tokens in zip(units[index::each], expected, strict=True):
            assert stream.tokens[example].tolist() == tokens.ids.tolist()
            scored = stream.targets[example][stream.targets[example] != IGNORE_INDEX]
            end = "<|im_end|>" if " and " in labels else ""
            assert data.tokenizer.hf_tokenizer.decode(scored) == name + end


@pytest.mark.parametrize(("preset", "shape"), [("tiny", SEQ2SEQ), ("gptj_tiny", CAUSAL_LM)])
def test_long_prompts_are_cut_as_for_generation(preset, shape, tmp_path):
    data = {"validation": rows_of(tmp_path, ["hat", "lamp"]), "prompt": "{t}", "target": "{l}"}
    over = {"data": data | {"class_labels": "hat,lamp,box"}, "model": {"sequence_length": 8}}
    kind = {"tiny": T5Config, "gptj_tiny": GPTJConfig}[preset]
    pipeline = Pipeline(load_config(kind, "inference", preset, over), shape, DataCache())
    corpus = pipeline.read_corpus("validation")
    candidates = LabelCandidates.from_examples(pipeline, corpus, ["hat", "lamp", "box"])
    _, prompts = pipeline.make_prompts([example.prompt for example in corpus.examples])
    assert candidates.cut == prompts.num_truncated > 3
    samples = candidates.samples
    for index, (row, mask) in enumerate(zip(prompts.input_ids, prompts.mask, strict=True)):
        for unit in (2 * index, 2 * index + 1):
            (sample,) = np.flatnonzero((samples.pair_indices == unit).any(axis=1))
            batch, place = samples.take([sample]), np.argmax(samples.pair_indices[sample] == unit)
            first = 1 + place * (1 if shape is SEQ2SEQ else 2)
            read = batch["input_ids"][0][batch["segment_ids"][0] == first]
            length = int(mask.sum())
            assert read[:length].tolist() == row[:length].tolist()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "eval.constrained chooses among labels, but the task own data has none"),
        (
            ("--data.class_labels", "雪,山"),
            "the tokenizer gives the labels 雪 and 山 the same tokens",
        ),
    ],
)
def test_what_cannot_be_chosen_from_is_said(flags, said, tmp_path, capsys):
    rows = rows_of(tmp_path, ["雪", "山"])
    model = random_model(tmp_path / "model", "--config", "tiny", "--layers", "1")
    given = ("--data.prompt", "{t}", "--data.target", "{l}", "--data.validation", rows)
    load = ("--config", "tiny", *small("tiny"), "--load", str(model), "--eval.constrained")
    load += ("--micro_batch_size", "4")
    metrics = ("--eval.metrics", "accuracy") if flags else ()
    out = ("--out", str(tmp_path / "out"))
    assert run_validation.main([*load, *given, *flags, *metrics, *out]) == 2
    assert said in capsys.readouterr().err
