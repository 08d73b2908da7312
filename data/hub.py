"""The Hugging Face hub: what it can give or has cached, or one sentence that says why not.

Its libraries retry an unreachable hub for up to a minute. We ask once first, and without an answer
let them look into their cache only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from config.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

SECONDS_TO_ANSWER = 5.0


class DataUnavailable(UserError, ValueError):
    """A data set or tokenizer that is neither here nor to be had from the hub."""


def is_reachable() -> bool:
    """Whether the hub answers. False, without asking, where HF_HUB_OFFLINE=1 forbids to ask."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # whichever HTTP library the hub's uses, or its own if it is forbidden
        return False
    return True


def load_split(path: str, name: str | None, split: str) -> Dataset:
    """A split of a data set of the hub.

    Raises:
        DataUnavailable: it is not cached, and the hub cannot be reached.
    """
    import datasets

    reachable = is_reachable()
    try:
        with _cache_only(not reachable):
            return datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError) as error:
        raise DataUnavailable(
            f"cannot get data set {path}{f'/{name}' if name else ''} from the Hugging Face hub"
            f"{_why(reachable, error)}: connect to the network, or use --data.dataset sample, or "
            "files of your own with --data.train and --data.validation"
        ) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in the folder `name`, or of the hub's model `name`.

    Raises:
        DataUnavailable: there is no such folder, it is not cached, and the hub cannot be reached.
    """
    from pathlib import Path

    from transformers import AutoTokenizer

    local = Path(name).is_dir()
    reachable = not local and is_reachable()
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=not reachable)
    except (OSError, ValueError) as error:
        if local:
            raise DataUnavailable(
                f"folder {name} holds no tokenizer that transformers can load: "
                "give one with tokenizer.json and tokenizer_config.json"
            ) from error
        raise DataUnavailable(
            f"tokenizer {name} is no folder, and cannot be had from the Hugging Face hub"
            f"{_why(reachable, error)}: connect to the network, or give a folder with --tokenizer"
        ) from error


def _why(reachable: bool, error: Exception) -> str:
    """Why the hub did not give it, in parentheses; on one line, as errors of the hub are long."""
    return f" ({str(error).splitlines()[0]})" if reachable and str(error) else " (not reachable)"


@contextmanager
def _cache_only(wanted: bool) -> Iterator[None]:
    """Keep `datasets` from the network; it has a setting for this, but no argument."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or wanted
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
