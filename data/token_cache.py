"""Cache of tokenized data in the run folder; large data are tokenized by several processes.

A file's name is a digest of all that its content follows from: the data, the tokenizer, the
template, the settings, the programs in this folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import popdist
from data.examples import Corpus
from data.sources import DataError
from data.task import Split
from data.token_store import read_token_store
from files.atomic_writing import wrap_write_errors
from files.errors import FileError, WriteError
from files.formatting import format_path
from files.json_files import JsonObject
from files.run_folder import RunFolder
from files.temp_folders import fsync, temp_folder
from terminal.screen import is_first_process, say

if TYPE_CHECKING:
    from data.pipeline import Pipeline

MAX_PROCESSES = 16
"""Maximum number of tokenizing processes."""

LIBRARIES = ("jinja2", "tokenizers", "transformers")
"""Libraries whose versions affect texts and tokens."""

DATA_FOLDER = Path(__file__).parent


TokenizedSplits = dict[Split, tuple[Corpus, JsonObject]]
"""Tokenized examples and metadata, by split."""


def load_or_tokenize(data: Pipeline, split: Split) -> TokenizedSplits | None:
    """Load the cached tokens of a split and its held-out split, or tokenize their examples.

    Returns None if no disk has space, so that this process must read the data itself.

    Raises:
        UserError: the data do not fit the task; or no disk has room, and there are several
            processes, which would no longer read the same files.
    """
    splits, save = data.task.splits_sharing_source(split), data.user_config.checkpoint.save
    state, name = data.task.source_of_split(split).file_fingerprints(), _cache_key(data, split)
    cache_folder = None if save is None else RunFolder(Path(save)).tokenized_data_folder / name
    if cache_folder is not None and cache_folder.is_dir():
        try:
            tokenized = {
                name_of_split: read_token_store(cache_folder / f"{name_of_split}.safetensors")
                for name_of_split in splits
            }
            say(f"the data are ready in {cache_folder}")
            return tokenized
        except FileError as error:
            say(f"warning: {error}: the data are read anew")
            shutil.rmtree(cache_folder, ignore_errors=True)
    for target in (None,) if cache_folder is None else (cache_folder, None):
        try:
            return _tokenize_into_folder(data, split, target, splits, state)
        except WriteError as error:
            if target is None and popdist.getNumInstances() > 1:
                raise
            say(f"warning: {error}")
    return None


def _tokenize_into_folder(
    data: Pipeline,
    split: Split,
    cache_folder: Path | None,
    splits: Sequence[Split],
    state: list[object],
) -> TokenizedSplits:
    """Tokenize a data split into files of a folder, and open the files.

    Args:
        cache_folder: where their files stay; None: nowhere.
        state: of the data before their digest was taken, which the files are named after.

    Raises:
        DataError: the data have changed since then.
        WriteError: the files cannot be written.
    """
    with (
        wrap_write_errors("prepared data to", cache_folder or tempfile.gettempdir()),
        _cache_or_temp_folder(cache_folder) as parent,
    ):
        folder = Path(parent) / "files"
        folder.mkdir()
        _run_tokenize_worker(data, split, folder)
        if (source := data.task.source_of_split(split)).file_fingerprints() != state:
            raise DataError(
                f"{format_path(source.name)} has changed while it was read: start again when "
                "nobody writes to it"
            )
        tokenized = {
            name_of_split: read_token_store(folder / f"{name_of_split}.safetensors")
            for name_of_split in splits
        }
        if cache_folder is not None and is_first_process():
            with suppress(OSError):  # another process was first: it is made again
                fsync(folder)
                os.rename(folder, cache_folder)
        return tokenized


def _cache_or_temp_folder(cache_folder: Path | None) -> AbstractContextManager[str | Path]:
    """Context with the folder for files of tokens: in the cache, or a temporary one."""
    if cache_folder is None:
        return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    cache_folder.parent.mkdir(parents=True, exist_ok=True)
    return temp_folder(cache_folder.parent)


def _run_tokenize_worker(data: Pipeline, split: Split, folder: Path) -> None:
    """Run the program that tokenizes a data split into files of a folder."""
    request = {
        "config": data.user_config.to_dict(),
        "split": split,
        "sample_format": data.sample_format.name,
        "processes": _num_usable_cpus(),
    }
    paths = [str(DATA_FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (
        tqdm(unit=" rows", leave=False, disable=not is_first_process() or None) as bar,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "data.tokenize_worker", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it is over already: its code says why
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if isinstance(message, dict):
                    raise (WriteError if message["unwritten"] else DataError)(message["error"])
                bar.update(message - bar.n)
        except BaseException:
            process.terminate()
            raise
        if process.wait():
            errors.seek(0)
            last_line = (errors.read().strip().splitlines() or [f"code {process.returncode}"])[-1]
            raise DataError(
                f"the processes that read the data broke off ({last_line}): try again, with more "
                "memory if there was too little"
            )


def _num_usable_cpus() -> int:
    """Number of CPUs on which this process can tokenize data."""
    num_cpus = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(min(num_cpus // popdist.getNumInstances(), MAX_PROCESSES), 1)


def _cache_key(data: Pipeline, split: Split) -> str:
    """Hash of all that determines the examples and tokens of a data split."""
    sha256 = hashlib.sha256()
    for path in sorted(DATA_FOLDER.glob("*.py")):
        sha256.update(path.read_bytes())
    versions = [version(name) for name in LIBRARIES]
    values: list[Any] = [
        split,
        data.cache_key,
        data.tokenizer.identity_values,
        data.task.validation_fraction,
        versions,
    ]
    sha256.update(json.dumps(values, default=str).encode())
    for digest in data.task.source_of_split(split).iter_file_hashes():
        sha256.update(digest)
    return sha256.hexdigest()[:32]
