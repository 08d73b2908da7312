"""Downloads from the Hugging Face hub and its cache; errors are explained in one sentence.

Its libraries retry an unreachable hub for up to a minute. We ask once first; without an answer they
only look into their cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.errors import UserError
from files.formatting import format_name, format_names, format_path, format_value
from files.json_files import read_json_object
from files.text_files import check_not_lfs_pointer
from huggingface.tokenizer_checks import (
    TOKENIZER_FILE,
    check_text_growth,
    check_vocabulary,
    special_token_arguments,
    wrap_rust_panics,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

TIMEOUT_SECONDS = 5.0
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "config.json",
)  # fmt: skip


DATASET_FILES = ("dataset_dict.json", "state.json")
"""Files that `Dataset.save_to_disk` writes: of several splits, and of one."""


class DataUnavailable(UserError, ValueError):
    """Raised for a data set or tokenizer that is neither on this machine nor on the hub."""


def is_reachable() -> bool:
    """True if the hub responds; False, without a request, if HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception:  # any error of the HTTP library in use, or of the hub's library if offline
        return False
    return True


def load_split(path: str, name: str | None, split: str) -> Dataset:
    """Load a split of a data set from the hub or its cache.

    Raises:
        DataUnavailable: it is not cached, and the hub cannot be reached.
    """
    import datasets

    reachable = is_reachable()
    try:
        with _offline_datasets(not reachable):
            return datasets.load_dataset(path, name, split=split)
    except Exception as error:  # its library raises exceptions of many kinds
        from huggingface.hub_errors import explain_hub_error

        problem = explain_hub_error(path, error, reachable, "dataset")
        raise DataUnavailable(
            f"cannot get data set {path}{f'/{name}' if name else ''} from the Hugging Face hub"
            f" ({problem.reason}): {problem.advice}, or use --data.dataset sample, or "
            "files of your own with --data.train and --data.validation"
        ) from error


def load_saved_split(folder: str, split: str) -> Dataset:
    """Load a split of a data set that `save_to_disk` wrote.

    A folder without splits is the only one.

    Raises:
        DataUnavailable: the folder is damaged, or has other splits only.
    """
    import datasets

    try:
        dataset = datasets.load_from_disk(folder)
    except Exception as error:  # its library raises exceptions of many kinds
        reason = format_name(str(error).partition(chr(10))[0], 60)
        raise DataUnavailable(
            f"folder {format_path(folder)} holds no data set that datasets can load ({reason}): "
            "save it again with save_to_disk"
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise DataUnavailable(
            f"folder {format_path(folder)} has no split {split}, but {format_names(dataset)}: name "
            f"one, such as {format_path(folder)}/{next(iter(dataset), split)}"
        )
    return dataset[split]


def read_class_names(dataset: Dataset, column: str) -> tuple[str, ...] | None:
    """Class names of a ClassLabel column of a data set; None for other columns."""
    feature = dataset.features.get(column) if dataset.features else None
    names = getattr(feature, "names", None)
    return None if names is None else tuple(map(str, names))


def check_not_cache(folder: Path) -> None:
    """Raise UserError if a folder is a model's cache folder, which holds snapshots."""
    if not (folder / "snapshots").is_dir():
        return
    prefix, _, name = folder.resolve().name.partition("--")  # models--OWNER--NAME
    suggestion = f" {format_name(name.replace('--', '/'))}" if prefix == "models" and name else ""
    raise UserError(
        f"{format_path(folder)} is a folder of the hub's cache: give the model's "
        f"name{suggestion}, or one of the folders in its snapshots"
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder or of a model on the hub.

    Raises:
        DataUnavailable: there is no such folder, it is not cached, and the hub cannot be reached.
    """
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir()
    if is_local:
        check_not_cache(Path(name))
        _check_tokenizer_files(Path(name))
    reachable = not is_local and is_reachable()
    try:
        check_text_growth(_find_tokenizer_json(name, local_files_only=not reachable))
        special = special_token_arguments(name, local_files_only=not reachable)
        # Without trust_remote_code, it asks at the terminal whether to run code from the folder.
        with wrap_rust_panics(), warnings.catch_warnings():
            # Marian's asks for a library that it then does not call.
            warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
            tokenizer = AutoTokenizer.from_pretrained(
                name, local_files_only=not reachable, trust_remote_code=False, **special
            )
            tokenizer(["a", ""])  # settings of a wrong type fail only when it is used
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for damaged files
        if is_local:
            _check_no_code(Path(name))
            raise DataUnavailable(
                f"folder {format_path(name)} holds no tokenizer that transformers can load "
                f"({format_name(str(error).partition(chr(10))[0], 60)}): "
                "give one with tokenizer.json and tokenizer_config.json"
            ) from error
        from huggingface.hub_errors import explain_hub_error

        problem = explain_hub_error(name, error, reachable)
        raise DataUnavailable(
            f"tokenizer {name} is no folder, and cannot be had from the Hugging Face hub"
            f" ({problem.reason}): {problem.advice}, or give a folder with --tokenizer"
        ) from error
    check_vocabulary(tokenizer, name)
    return tokenizer


def _find_tokenizer_json(name: str, **options: Any) -> Path:
    """Path of a tokenizer.json, which is downloaded if the model is on the hub."""
    from transformers.utils import cached_file

    local_file = Path(name) / TOKENIZER_FILE
    if not local_file.is_file() and not Path(name).is_dir():
        with suppress(OSError):  # what is wrong shows when the tokenizer is loaded
            return Path(cached_file(name, TOKENIZER_FILE, **options) or local_file)
    return local_file


def _check_tokenizer_files(folder: Path) -> None:
    """Raise UserError if tokenizer files are damaged or git-lfs pointers."""
    for pattern in ("*.model", "*.txt", "*.json"):
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                check_not_lfs_pointer(path)
    for name in TOKENIZER_FILES:
        if not (folder / name).exists():
            continue
        tokenizer_config = read_json_object(folder / name)
        tokenizer_class = tokenizer_config.data.get("tokenizer_class")
        if not isinstance(tokenizer_class, str | None):
            raise DataUnavailable(
                f"{format_path(folder / name)} has the tokenizer_class "
                f"{format_value(tokenizer_class)}, but it must be the name of a class of "
                "transformers, or left out"
            )


def _check_no_code(folder: Path) -> None:
    """Raise UserError if a tokenizer needs custom code (`auto_map`)."""
    for name in TOKENIZER_FILES:
        if (folder / name).exists() and read_json_object(folder / name).data.get("auto_map"):
            raise DataUnavailable(
                f"{format_path(folder / name)} asks to run code of its own (auto_map), which is "
                "never done: give a tokenizer of a class that transformers has"
            )


@contextmanager
def _offline_datasets(offline: bool) -> Iterator[None]:
    """Context in which the library `datasets` is in offline mode."""
    from datasets import config

    previous = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = previous or offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = previous
