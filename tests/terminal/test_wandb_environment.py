"""Weights & Biases without a key: said before anything is imported or compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import terminal.wandb_environment
from config.errors import UserError
from terminal.wandb_environment import check_wandb

SAID = "--wandb finds no key of Weights & Biases: run `wandb login`, or set WANDB_API_KEY, or "


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path) -> None:
    """A person who has never used it."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC",
                 "WANDB_CONFIG_DIR"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"])
def test_a_key_or_a_mode_without_one_suffices(name, monkeypatch):
    with pytest.raises(UserError, match=SAID):
        check_wandb()
    monkeypatch.setenv(name, "offline")
    check_wandb()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".netrc", "machine api.wandb.ai login user password 0123\n"),
        (".netrc", "what wandb itself complains of"),
        (".config/wandb/settings", "[default]\nmode = offline\n"),
    ],
)
def test_what_wandb_login_leaves_suffices(file, text, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / file).chmod(0o600)
    check_wandb()


def test_an_empty_netrc_does_not(tmp_path):
    (tmp_path / ".netrc").touch(0o600)
    with pytest.raises(UserError, match=SAID):
        check_wandb()


def test_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(terminal.wandb_environment, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        check_wandb()


def test_a_run_says_it_before_it_imports_anything():
    code = (
        "import sys, run_finetuning\n"
        "assert run_finetuning.main(['--wandb', '--config', 'tiny']) == 2\n"
        "assert not {'jax', 'transformers', 'wandb'} & sys.modules.keys()\n"
    )
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"error: {SAID}")
