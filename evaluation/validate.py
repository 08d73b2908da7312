"""The validation run: generate an answer to every prompt of the validation set, and count.

Generation is greedy. Prompts are padded to the longest one of the set, and as many tokens are
generated as the longest answer has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from checkpoints import CheckpointStore, has_checkpoint
from checkpoints.start import load_weights
from config.cli import CommandLine
from config.screen import say
from data.mnli import LABEL_WORDS, Corpus, load_corpus, read_answer
from data.prompts import Prompts
from evaluation.report import Answer, ValidationReport
from modelling.compiling import compiled
from modelling.inference import Inference
from modelling.spec import family_of
from modelling.text import fitting_prompts, fitting_tokenizer
from records.run_directory import choose_path


def validate(line: CommandLine) -> ValidationReport:
    """Validate as the command line says, and write validation.json.

    Raises:
        UserError: for anything a person can mend.
    """
    config = line.config
    start = load_weights(config, family_of(config).weights(config))
    corpus = load_corpus(config.data.dataset, "validation")
    tokenizer = fitting_tokenizer(config)
    fitted, prompts = fitting_prompts(config, corpus.examples, tokenizer)
    model = compiled(Inference, fitted, line)
    model.write(start.tensors)
    begin = time.perf_counter()
    texts = tokenizer.batch_decode(_generated(model, prompts), skip_special_tokens=True)
    seconds = time.perf_counter() - begin
    facts = {
        "weights": start.source,
        "step": start.step,
        "dataset": config.data.dataset,
        "left_out_without_label": corpus.unlabelled,
        "prompts_cut": prompts.truncated,
        "seconds": round(seconds, 3),
    }
    report = ValidationReport(LABEL_WORDS, _answers(corpus, prompts, texts), facts)
    path = report.write(_directory(line))
    say(f"{len(texts)} answers in {seconds:.1f} s; details are in {path}")
    return report


def _generated(model: Inference, prompts: Prompts) -> np.ndarray:
    """The tokens of all answers, int32 [samples, tokens of the longest right answer]."""
    # Without a terminal there is no bar: a log of its states would tell nobody anything.
    bar = tqdm(total=len(prompts), unit="sample", disable=None, dynamic_ncols=True)
    with model, bar:
        return model.generate(prompts.words, prompts.mask, bar.update)


def _answers(corpus: Corpus, prompts: Prompts, texts: Sequence[str]) -> list[Answer]:
    return [
        Answer(prompt, text, example.label, read_answer(text))
        for example, prompt, text in zip(corpus.examples, prompts.texts, texts, strict=True)
    ]


def _directory(line: CommandLine) -> Path:
    """Where the report goes: what --out names, else beside the checkpoints, else a new one."""
    load = line.config.checkpoint.load
    if line.options.out or load is None or not has_checkpoint(load):
        return choose_path(line.options.out, None, f"validation-{Path(line.preset).stem}")
    is_one_step = not CheckpointStore(load).steps()
    return Path(load).parent if is_one_step else Path(load)
