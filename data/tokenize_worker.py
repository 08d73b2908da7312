"""Tokenization of a split in several processes; `data.token_cache` runs this module.

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
from config.families import config_class_of_preset
from data.causal_lm import CAUSAL_LM
from data.chat_template import ChatTemplate
from data.class_labels import UNLABELED
from data.data_warnings import DataWarnings
from data.examples import Example, TokenizedText
from data.pipeline import Pipeline
from data.row_formats import RowSchema
from data.sample_format import SampleFormat
from data.seq2seq import SEQ2SEQ
from data.sources import Row
from data.task import NULL_VALUE, Split
from data.token_store import TokenStore
from data.tokenizer import collect_characters
from files.errors import WriteError
from files.file_location import FileLocation
from files.json_files import JsonObject

SAMPLE_FORMATS: dict[str, SampleFormat] = {
    sample_format.name: sample_format for sample_format in (SEQ2SEQ, CAUSAL_LM)
}
"""Sample formats by name."""

CHUNK_ROWS = 500
"""Number of rows in a chunk for one process."""

Chunk = list[tuple[FileLocation, Row]]


class ChunkResult(NamedTuple):
    """Tokenized examples of several rows, with counts of dropped rows and data warnings."""

    rows: list[tuple[FileLocation, Example, TokenizedText]]
    left_out: tuple[int, int]
    characters: set[str]
    data_warnings: DataWarnings


class TokenizeContext(NamedTuple):
    """Data pipeline and task that forked worker processes share."""

    data: Pipeline
    row_schema: RowSchema
    chat_template: ChatTemplate | None

    def tokenize_chunk(self, chunk: Chunk) -> ChunkResult:
        """Tokenize some rows of a data source."""
        template, data, data_warnings = self.chat_template, self.data, self.data.new_data_warnings()
        if template is not None:
            template.warnings = data_warnings
        results = list(data.task.convert_rows(chunk, self.row_schema, template, data_warnings))
        num_dropped = tuple(
            sum(example == reason for _, example in results) for reason in (UNLABELED, NULL_VALUE)
        )
        kept_examples = [
            (location, example) for location, example in results if isinstance(example, Example)
        ]
        examples = [data.render_example(example) for _, example in kept_examples]
        tokens = data.tokenize_examples(examples)
        texts = (text for example in examples for text in example[:2])
        return ChunkResult(
            [(location, example.without_rendering(), ids)
             for (location, _), example, ids in zip(kept_examples, examples, tokens, strict=True)],
            (num_dropped[0], num_dropped[1]),
            collect_characters(texts),
            data_warnings,
        )  # fmt: skip


_context: TokenizeContext | None = None


def _tokenize_chunk(chunk: Chunk) -> ChunkResult:
    assert _context is not None
    return _context.tokenize_chunk(chunk)


def _group_rows_into_chunks(rows: Iterator[tuple[FileLocation, Row]]) -> Iterator[Chunk]:
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


def tokenize_split(data: Pipeline, split: Split, processes: int, folder: Path) -> None:
    """Tokenize a data split and its held-out split; writes one file for each of them.

    Raises:
        UserError: the data do not fit the task.
    """
    global _context
    task = data.task
    source = task.source_of_split(split)
    template = data.training_template() if data.is_chat else None
    _context = TokenizeContext(data, task.row_schema(source), template)
    data.tokenizer.decode([[data.tokenizer.eos_token_id]])  # loaded before the processes are made
    columns: dict[Split, TokenStore] = {
        name: TokenStore() for name in task.splits_sharing_source(split)
    }
    num_dropped, characters, rows = [0, 0], set[str](), 0
    data_warnings = DataWarnings()
    with ExitStack() as stack:
        map_chunks: Callable[..., Iterable[ChunkResult]] = map
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(processes))
            map_chunks = pool.imap
        for result in map_chunks(_tokenize_chunk, _group_rows_into_chunks(source.read_rows())):
            for location, example, tokens in result.rows:
                name = task.split_of_example(example, split)
                if name in columns:
                    columns[name].add_example(location, example, tokens)
            num_dropped = [a + b for a, b in zip(num_dropped, result.left_out, strict=True)]
            characters |= result.characters
            data_warnings.merge(result.data_warnings)
            rows += len(result.rows) + sum(result.left_out) + len(result.data_warnings.refused)
            print(rows, flush=True)
    for name, store in columns.items():
        store.write_columns(folder / f"{name}.safetensors", {
            "unlabeled": num_dropped[0], "nulls": num_dropped[1],
            "characters": "".join(sorted(characters)),
            "notes": data_warnings.to_dict(),
        })  # fmt: skip


def main() -> None:
    """Read a JSON request from standard input and tokenize the data split that it names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that asked decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    request = JsonObject(json.load(sys.stdin), "standard input")
    config = config_class_of_preset(request.get_dict("config"), "").from_dict(
        request.get_dict("config")
    )
    data = Pipeline(config, SAMPLE_FORMATS[request.get_text("sample_format")])
    split: Split = "train" if request.get_text("split") == "train" else "validation"
    try:
        tokenize_split(data, split, request.get_count("processes"), Path(sys.argv[1]))
    except UserError as error:
        unwritten = isinstance(error, WriteError)
        print(json.dumps({"error": str(error), "unwritten": unwritten}), flush=True)


if __name__ == "__main__":
    main()
