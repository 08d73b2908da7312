"""Natural language inference in MNLI's form: examples, prompts, and answers read back as labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from data import hub
from files.json_files import read_json_lines

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

DatasetName = Literal["sample", "mnli"]
Split = Literal["train", "validation"]

LABEL_WORDS = ("entailment", "neutral", "contradiction")
"""What the model answers, by label id."""

SAMPLE_FOLDER = Path(__file__).parent / "sample"
MNLI_SPLITS: dict[Split, str] = {"train": "train", "validation": "validation_mismatched"}
TOKENIZERS: dict[str, dict[DatasetName, str]] = {
    "t5": {
        "sample": str(SAMPLE_FOLDER / "t5_tokenizer"),
        "mnli": "google/flan-t5-small",  # all sizes of FLAN-T5 have the same tokenizer
    },
    "gptj": {
        "sample": str(SAMPLE_FOLDER / "gptj_tokenizer"),
        "mnli": "EleutherAI/gpt-j-6b",
    },
}
"""Default tokenizers by model family."""


class Example(NamedTuple):
    """A pair of sentences; `label` is the index of its word in `LABEL_WORDS`."""

    premise: str
    hypothesis: str
    label: int


@dataclass(frozen=True)
class Corpus:
    """Labelled examples, and how many others were left out because they have no label (-1)."""

    examples: list[Example]
    unlabelled: int


def load_corpus(dataset: DatasetName, split: Split) -> Corpus:
    """The examples of a split, in the order of the data set.

    Args:
        dataset: "sample" is the corpus in data/sample, "mnli" is GLUE/MNLI, whose
            `validation_mismatched` stands for "validation".

    Raises:
        DataUnavailable: the sample's file is missing, or MNLI is not cached and the hub cannot be
            reached.
    """
    rows: Iterable[Mapping[str, Any]]
    if dataset == "sample":
        rows = _sample_rows(split)
    else:
        rows = hub.load_split("glue", "mnli", MNLI_SPLITS[split])
    examples = [Example(row["premise"], row["hypothesis"], row["label"]) for row in rows]
    labelled = [example for example in examples if example.label in range(len(LABEL_WORDS))]
    return Corpus(labelled, len(examples) - len(labelled))


def _sample_rows(split: Split) -> list[dict[str, Any]]:
    path = SAMPLE_FOLDER / f"{split}.jsonl"
    if not path.exists():
        raise hub.DataUnavailable(
            f"{path} is missing: write it with python -m data.sample.generate"
        )
    return read_json_lines(path)


def load_tokenizer(
    dataset: DatasetName, name: str | None = None, family: str = "t5"
) -> PreTrainedTokenizerFast:
    """The tokenizer in the folder or of the hub's model `name`.

    By default it is that of the data set for the model family.

    Raises:
        DataUnavailable: there is no such folder, and the hub cannot be reached.
    """
    return hub.load_tokenizer(TOKENIZERS[family][dataset] if name is None else name)


def encoder_prompt(example: Example) -> str:
    """What the encoder reads."""
    return f"mnli hypothesis: {example.hypothesis} premise: {example.premise}"


def causal_prompt(example: Example) -> str:
    """What a language model goes on from: its answer follows, with a space before it."""
    return f"{encoder_prompt(example)} target:"


def read_answer(text: str) -> int | None:
    """The label that an answer names, or None if it names none."""
    word = text.strip()
    return LABEL_WORDS.index(word) if word in LABEL_WORDS else None


def read_answers(tokenizer: PreTrainedTokenizerFast, tokens: np.ndarray) -> list[int | None]:
    """The labels that generated tokens, int [n, length], name."""
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [read_answer(text) for text in texts]
