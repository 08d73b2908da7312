"""Early check that Weights & Biases can be used."""

from __future__ import annotations

import netrc
import os
from importlib.util import find_spec

from config.errors import UserError
from files.formatting import format_value

MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_WITHOUT_KEY = ("offline", "disabled", "dryrun")
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_wandb() -> None:
    """Checks the environment variables and the login of Weights & Biases.

    Raises:
        UserError: it is not installed, WANDB_MODE is no mode, or there is no key.
    """
    mode = os.environ.get("WANDB_MODE", "")
    if mode and mode not in MODES:
        raise UserError(
            f"the environment variable WANDB_MODE is {format_value(mode)}, but must be one of "
            f"{', '.join(MODES[:3])}: set it, or leave out --wandb"
        )
    if find_spec("wandb") is None:
        raise UserError("--wandb needs the package wandb: pip install wandb")
    if mode not in _WITHOUT_KEY and not (any(map(os.environ.get, _KEYS)) or _is_logged_in()):
        raise UserError(
            "--wandb finds no key of Weights & Biases: run `wandb login`, or set WANDB_API_KEY, or "
            "WANDB_MODE=offline, or leave out --wandb"
        )


def _is_logged_in() -> bool:
    """Returns whether `wandb login` stored an API key; True if that is unclear."""
    configured = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    folders = os.path.expanduser(configured), "wandb"
    if any(os.path.exists(os.path.join(folder, "settings")) for folder in folders):
        return True  # which may have a key or a mode
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            return bool(netrc.netrc(os.path.expanduser(path)).hosts)
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError):
            return True
    return False
