"""Tokenize a split in several processes; `data.token_cache` runs this.

python3 -m data.tokenize_worker FOLDER

A process of its own, since it forks: JAX, which the run has loaded, has threads that a fork would
break. Standard input says what is wanted. It writes the number of rows so far to standard output, a
line each time, and at the end an error, if there is one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError
from config.families import config_class_of
from data.causal_lm import CAUSAL_LM
from data.chat_template import ChatTemplate
from data.class_labels import UNLABELLED
from data.data_warnings import Notes
from data.examples import Example, Tokens
from data.pipeline import Pipeline
from data.row_formats import Reading
from data.sample_format import SampleFormat
from data.seq2seq import SEQ2SEQ
from data.sources import Row
from data.task import NULL, Split
from data.token_store import Columns
from data.tokenizer import characters_of
from files.errors import WriteError
from files.file_location import FileLocation
from files.json_files import JsonObject

SAMPLE_FORMATS: dict[str, SampleFormat] = {
    sample_format.name: sample_format for sample_format in (SEQ2SEQ, CAUSAL_LM)
}
"""The formats of samples that other processes know."""

CHUNK = 500
"""Rows that a process is given at once."""

Chunk = list[tuple[FileLocation, Row]]


class Found(NamedTuple):
    """What a chunk of rows became."""

    rows: list[tuple[FileLocation, Example, Tokens]]
    left_out: tuple[int, int]
    characters: set[str]
    notes: Notes


class Work(NamedTuple):
    """What forked processes share."""

    data: Pipeline
    reading: Reading
    chat: ChatTemplate | None

    def of(self, chunk: Chunk) -> Found:
        """Make examples and tokens of rows."""
        chat, data, notes = self.chat, self.data, self.data.notes()
        if chat is not None:
            chat.noted = notes
        found = list(data.task.examples(chunk, self.reading, chat, notes))
        left_out = tuple(sum(one == why for _, one in found) for why in (UNLABELLED, NULL))
        kept = [(place, one) for place, one in found if isinstance(one, Example)]
        examples = [data.as_asked(one) for _, one in kept]
        tokens = data.encoded(examples)
        texts = (text for one in examples for text in one[:2])
        return Found(
            [(place, Example(*one[:2], part=one.part), ids)
             for (place, _), one, ids in zip(kept, examples, tokens, strict=True)],
            (left_out[0], left_out[1]),
            characters_of(texts),
            notes,
        )  # fmt: skip


_work: Work | None = None


def _of(chunk: Chunk) -> Found:
    assert _work is not None
    return _work.of(chunk)


def _chunks(rows: Iterator[tuple[FileLocation, Row]]) -> Iterator[Chunk]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


def prepare(data: Pipeline, split: Split, processes: int, folder: Path) -> None:
    """Write a file for the split, and for the one that is held out of it.

    Raises:
        UserError: the data do not fit the task.
    """
    global _work
    task = data.task
    source = task.source(split)
    chat = data.training_template() if data.is_chat else None
    _work = Work(data, task.reading(source), chat)
    data.tokenizer.texts([[data.tokenizer.end]])  # loaded before the processes are made
    columns: dict[Split, Columns] = {name: Columns() for name in task.with_held_out(split)}
    left_out, characters, rows = [0, 0], set[str](), 0
    notes = Notes()
    with ExitStack() as stack:
        mapped: Callable[..., Iterable[Found]] = map
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(processes))
            mapped = pool.imap
        for found in mapped(_of, _chunks(source.rows())):
            for place, example, tokens in found.rows:
                name = task.split_of(example, split)
                if name in columns:
                    columns[name].add(place, example, tokens)
            left_out = [a + b for a, b in zip(left_out, found.left_out, strict=True)]
            characters |= found.characters
            notes.merge(found.notes)
            rows += len(found.rows) + sum(found.left_out) + len(found.notes.refused)
            print(rows, flush=True)
    for name, one in columns.items():
        one.write(folder / f"{name}.safetensors", {
            "unlabelled": left_out[0], "nulls": left_out[1],
            "characters": "".join(sorted(characters)),
            "notes": notes.to_dict(),
        })  # fmt: skip


def main() -> None:
    """Read what is asked for, and answer it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that asked decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    asked = JsonObject(json.load(sys.stdin), "standard input")
    config = config_class_of(asked.mapping("config"), "").from_dict(asked.mapping("config"))
    data = Pipeline(config, SAMPLE_FORMATS[asked.text("sample_format")])
    split: Split = "train" if asked.text("split") == "train" else "validation"
    try:
        prepare(data, split, asked.count("processes"), Path(sys.argv[1]))
    except UserError as error:
        unwritten = isinstance(error, WriteError)
        print(json.dumps({"error": str(error), "unwritten": unwritten}), flush=True)


if __name__ == "__main__":
    main()
