"""Explanations of Hugging Face hub errors, with advice."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from files.formatting import format_name, format_path

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that switch Hugging Face's libraries to offline mode."""

_TRUE = ("1", "ON", "YES", "TRUE")
_NOUNS = {"model": "model", "dataset": "data set"}
_LOGIN = "`hf auth login` or HF_TOKEN"
_FILE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
_BAD_TOKEN = "Invalid credentials in Authorization header"


class HubErrorExplanation(NamedTuple):
    """Reason of a failed download, and advice; both are clauses of one sentence."""

    reason: str
    advice: str


def explain_hub_error(
    name: str, error: BaseException, reachable: bool, repo: Literal["model", "dataset"] = "model"
) -> HubErrorExplanation:
    """Explain an exception that Hugging Face's libraries raised.

    Args:
        name: of the model or data set.
        error: theirs, with its causes.
        reachable: the hub answers.
        repo: the kind of repository that `name` is.
    """
    response = _find_response(error) or (_find_access_refusal(name, repo) if reachable else None)
    if response is not None:
        return _explain_response(name, response, repo)
    file_error = next((cause for cause in _iterate_causes(error) if _is_file_error(cause)), None)
    if isinstance(file_error, OSError):
        return HubErrorExplanation(
            f"the cache {format_path(_cache_folder())} cannot be used ({file_error.strerror})",
            "set HF_HOME to a folder that can be written",
        )
    variable = _find_offline_variable(repo)
    if variable is not None or not reachable:
        return _explain_unreachable(variable)
    return HubErrorExplanation(format_name(str(error).partition("\n")[0], 120), "check the name")


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that caused it, the outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _find_response(error: BaseException) -> Any:
    """HTTP response attached to an exception or to one of its causes; None without one."""
    responses = (getattr(cause, "response", None) for cause in _iterate_causes(error))
    return next((cause for cause in responses if hasattr(cause, "status_code")), None)


def _find_access_refusal(name: str, repo: str) -> Any:
    """HTTP response by which the hub refuses access to a repository; None without one.

    The library `datasets` drops it from its errors.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().auth_check(name, repo_type=repo)
    except Exception as error:  # of the library, or of the HTTP library in use
        response = _find_response(error)
        return response if response is not None and response.status_code in (401, 403) else None
    return None


def _is_file_error(error: BaseException) -> bool:
    """True if the file system raised the exception, such as on a write to the cache."""
    return isinstance(error, OSError) and error.errno in _FILE_ERRNOS


def _cache_folder() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _find_offline_variable(repo: str) -> str | None:
    """Name of the environment variable that sets offline mode; None without one."""
    names = OFFLINE_VARIABLES if repo == "dataset" else OFFLINE_VARIABLES[:2]
    return next((name for name in names if os.environ.get(name, "").upper() in _TRUE), None)


def _explain_unreachable(variable: str | None) -> HubErrorExplanation:
    """Explain that the hub cannot be reached and that the cache is incomplete."""
    from huggingface_hub import constants

    missing = f"and the cache {format_path(_cache_folder())} does not have all of it"
    if variable is not None:
        advice = f"connect to the network and unset {variable}"
        return HubErrorExplanation(f"{variable} is set, {missing}", advice)
    return HubErrorExplanation(
        f"{constants.ENDPOINT} is not reachable, {missing}", "connect to the network"
    )


def _explain_response(name: str, response: Any, repo_type: str) -> HubErrorExplanation:
    """Explain an HTTP error response of the Hugging Face hub."""
    from huggingface_hub import constants, get_token

    page_url = (
        f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{format_name(name)}"
    )
    tokens_url = f"{constants.ENDPOINT}/settings/tokens"
    status, code = response.status_code, response.headers.get("X-Error-Code")
    message = response.headers.get("X-Error-Message")
    has_token = get_token() is not None
    if code == "GatedRepo" and has_token:
        return HubErrorExplanation(
            "it is gated, and the account of your token has no access",
            f"accept its license at {page_url} with that account, and give the token the right to "
            f"read gated repositories at {tokens_url}",
        )
    if code == "GatedRepo":
        return HubErrorExplanation(
            "it is gated",
            f"accept its license at {page_url}, make a token at {tokens_url}, and give it by "
            f"{_LOGIN}",
        )
    if status == 401 and message == _BAD_TOKEN:
        return HubErrorExplanation(
            "the hub does not accept your token",
            f"make another one at {tokens_url}, and give it by {_LOGIN}",
        )
    if status == 404 or code == "RepoNotFound" or (status == 401 and not has_token):
        return HubErrorExplanation(
            f"the hub has no such {_NOUNS[repo_type]}, or it is private",
            f"check the name at {page_url}; a private one needs a token, by {_LOGIN}",
        )
    if status in (401, 403):
        whose = "with your token" if has_token else "without a token"
        reason = f"the hub forbids it {whose}{f' ({format_name(message, 80)})' if message else ''}"
        return HubErrorExplanation(
            reason,
            f"check access at {page_url}, and the token's rights at {tokens_url}; give it by "
            f"{_LOGIN}",
        )
    if status == 429:
        advice = "wait some minutes" + ("" if has_token else f", or give a token by {_LOGIN}")
        return HubErrorExplanation("the hub refuses more requests for now", advice)
    return HubErrorExplanation(f"the hub answers with status {status}", "try again later")
