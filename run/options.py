"""Command-line options of the training script that are not configuration fields."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, Self

from config.errors import ConfigError
from terminal.parser import EXPORT_OPTION, parse_count_option, parse_path_option, parse_port_option


def _flag_field(name: str, default: Any = None, grouped: bool = True, **argument: Any) -> Any:
    """Declare an option of the training script as a dataclass field with its flag.

    Args:
        name: its flag.
        grouped: True lists it with the options of the run, False with those of all scripts.
        argument: keyword arguments of argparse.
    """
    return field(default=default, metadata={"flag": name, "grouped": grouped, "more": argument})


@dataclass(frozen=True)
class RunOptions:
    """Values of the training script's command-line options.

    Attributes:
        name: name of the config, for messages.
        command: the full command as typed; "": not started by a command.
    """

    name: str
    command: str = ""
    overwrite: bool = _flag_field(
        "--overwrite",
        default=False,
        action="store_true",
        help="delete the run in --save and start over, instead of resuming it",
    )
    run_dir: str | None = _flag_field(
        "--run-dir",
        metavar="DIR",
        type=parse_path_option,
        help="where config.yml, metrics.jsonl and the loss curve go; by default what --save names, "
        "else a new directory under runs/",
    )
    wandb: bool = _flag_field(
        "--wandb", default=False, action="store_true", help="log the run to Weights & Biases"
    )
    wandb_name: str | None = _flag_field(
        "--wandb-name", metavar="NAME", help="name of the Weights & Biases run"
    )
    wandb_project: str | None = _flag_field(
        "--wandb-project",
        metavar="NAME",
        help="project of the Weights & Biases run; else WANDB_PROJECT, else popxl- and the family",
    )
    tensorboard: bool = _flag_field(
        "--tensorboard",
        default=False,
        action="store_true",
        help="write TensorBoard's events to the run directory",
    )
    preview: int = _flag_field(
        "--data.preview",
        default=0,
        metavar="N",
        type=parse_count_option,
        help="print N samples token by token, with the loss tokens marked",
    )
    metrics_port: int | None = _flag_field(
        "--metrics.port",
        metavar="PORT",
        type=parse_port_option,
        help="serve the values of the last step to Prometheus; /metrics of this port",
    )
    metrics_host: str = _flag_field(
        "--metrics.host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of this machine to serve them at; 127.0.0.1, by default, is reached from "
        "this machine alone",
    )
    profile: int | None = _flag_field(
        "--profile",
        metavar="STEPS",
        type=parse_count_option,
        help="write a trace of so many steps, and a table of time by phase, into the run "
        "directory; without --save and --save-hf the run ends there",
    )
    watchdog_seconds: int = _flag_field(
        "--watchdog_seconds",
        default=300,
        metavar="SECONDS",
        type=parse_count_option,
        help="when a step, a save or a disk takes longer than this (300), say which process waits "
        "for what; after a signal, give up files that do not answer for so long",
    )
    save_hf: str | None = _flag_field("--save-hf", grouped=False, **EXPORT_OPTION)

    def __post_init__(self) -> None:
        named = {"--wandb-name": self.wandb_name, "--wandb-project": self.wandb_project}
        unused = [flag for flag, name in named.items() if name is not None and not self.wandb]
        if unused:
            raise ConfigError(f"{unused[0]} is for --wandb: give that too, or leave it out")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the training script's options to an argument parser."""
        group = parser.add_argument_group("the run")
        for option in fields(cls):
            if option.metadata:
                flag, more = option.metadata["flag"], option.metadata["more"]
                to = group if option.metadata["grouped"] else parser
                to.add_argument(flag, dest=option.name, default=option.default, **more)

    @classmethod
    def from_args(cls, args: argparse.Namespace, name: str, command: str) -> Self:
        """Create the options from parsed command line arguments."""
        values = {
            option.name: getattr(args, option.name) for option in fields(cls) if option.metadata
        }
        return cls(name, command, **values)
