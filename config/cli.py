"""What every script shares: reading its command line, and ending on a person's mistake.

A script is a short main:

    @entry_point()
    def main(arguments: Sequence[str] | None = None) -> None:
        line = read_command_line(__doc__, "finetuning", "xxl_pod64", arguments)
        ...

    if __name__ == "__main__":
        sys.exit(main())
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import Any, NoReturn, Protocol

import popdist
from config.errors import ConfigError, Notice, UserError
from config.families import config_class_of
from config.flags import add_field_flags, field_overrides, spell_flags
from config.help import field_help, formatter
from config.interrupts import Interrupted, exit_code, interruptible, sentence
from config.presets import merge, preset_data, preset_names
from config.screen import hold_standard_streams, is_heard
from config.sections import RunConfig
from config.values import PathText, ValueType
from files.shown import shown_name, shown_path


class Main(Protocol):
    """A script's main: takes arguments, by default the process's own."""

    def __call__(self, arguments: Sequence[str] | None = None) -> None: ...


class EntryPoint(Protocol):
    """A main that returns an exit code."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


class Origins(Protocol):
    """Where a configuration comes from, other than a preset."""

    def saved(self, load: str) -> Mapping[str, Any] | None:
        """The configuration of the run that `--load` names, or None if that is no run."""
        ...

    def with_model(self, name: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """A configuration of the model in a Hugging Face folder or of the hub's.

        Args:
            data: how to run it, such as a preset; None: a preset for one device.
        """
        ...


USER_ERROR = 2
NOBODY_READS = 141  # 128 + SIGPIPE, as shells count


@dataclass(frozen=True)
class CommandLine:
    """A command line, read. Only scripts see it: they hand on what it holds, by name and type."""

    config: RunConfig
    """The preset with the flags over it."""

    preset: str
    """The preset's name, or the path of the file or run that was given instead."""

    options: argparse.Namespace
    """The values of the script's own options; each name with underscores."""


def read_command_line(
    description: str | None,
    presets: str | Path,
    default_preset: str,
    arguments: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    origins: Origins | None = None,
) -> CommandLine:
    """Read `--config`, a flag for every field of its model family, and the script's own options.

    Without `--config`, the configuration is that of the run which `--load` names, if it names one.

    Args:
        description: what the script does, the head of its `--help`.
        presets: `"finetuning"`, `"inference"`, or the path of a YAML file of presets.
        default_preset: what `--config` is when nothing else says it.
        arguments: the arguments, without the program's name; those of the process by default.
        add_options: adds the script's own options to the parser.
        origins: understands `--load` of a run, and `--model`; None: the script takes presets only.

    Raises:
        ConfigError: if anything given is unknown, ambiguous, or of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    preset, data = _start(given, presets, default_preset, origins)
    config_class = config_class_of(data, preset)
    parser = _Parser(
        description=description,
        usage="%(prog)s [--config NAME] [--FIELD VALUE ...]",
        epilog=f"In brackets: values of {preset}. Presets: {', '.join(preset_names(presets))}",
        allow_abbrev=False,
        formatter_class=formatter,
    )
    _add_config_options(parser, default_preset, origins)
    parser.add_argument("--help-all", action="help", help="show all fields, in full")
    if add_options:
        add_options(parser)
    names = parser.names()
    _add_process_options(parser)
    flags = parser.flags()
    all_fields = any(a.replace("_", "-") == "--help-all" for a in given)
    add_field_flags(parser, config_class, field_help(config_class, data, str(presets), all_fields))
    parsed = vars(parser.parse_args(spell_flags(given, config_class, flags)))
    return CommandLine(
        config=config_class.from_dict(merge(data, field_overrides(parsed, config_class))),
        preset=preset,
        options=argparse.Namespace(**{name: parsed[name] for name in names if name in parsed}),
    )


def path_option(text: str) -> str:
    """The type of an option that names a file or folder."""
    try:
        return str(ValueType.of(PathText).check(text, "it"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_option(text: str) -> int:
    """The type of an option that counts something."""
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {shown_name(text)}")
    return number


def add_export_option(parser: argparse.ArgumentParser) -> None:
    """The option that writes a model for Hugging Face."""
    parser.add_argument(
        "--save-hf",
        metavar="DIR",
        type=path_option,
        help="a new folder for the model, in the form that Hugging Face's from_pretrained loads",
    )


def entry_point(
    *user_errors: type[Exception],
    alone: bool = False,
) -> Callable[[Main], EntryPoint]:
    """Make a script's main return an exit code, and say a person's mistake in one sentence.

    `UserError`, and what `user_errors` names, end with the message on stderr and code 2, and so do
    a file or disk that fails and memory that runs out. SIGINT ends with code 130, SIGTERM with
    143. Every other exception is a defect of ours and keeps its traceback. A `Notice` is shown as
    one line.

    Args:
        alone: the script is never one of several processes; it may start some itself.
    """

    expected: tuple[type[Exception], ...] = (UserError, popdist.DistributedError, *user_errors)

    def decorate(main: Main) -> EntryPoint:
        @functools.wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            hold_standard_streams()
            try:
                with interruptible(), _plain_notices():
                    if not alone:
                        _meet(sys.argv[1:] if arguments is None else arguments)
                    _run(main, arguments)
            except expected as error:
                return _say(f"error: {' '.join(str(error).split())}", USER_ERROR)
            except BrokenPipeError:  # such as `| head`
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it at its end
                if popdist.getNumInstances() > 1:  # the others must not wait for this one
                    popdist.end(NOBODY_READS)
                return NOBODY_READS
            except OSError as error:
                return _say(f"error: {_failure(error)}", USER_ERROR)
            except MemoryError as error:
                what = " ".join(str(error).split()) or "an array does not fit"
                return _say(f"error: there is not enough memory: {what}", USER_ERROR)
            except Interrupted as signal:
                return _say(str(signal), exit_code(signal.number))
            except KeyboardInterrupt:  # before, or where signals are somebody else's
                return _say(sentence(SIGINT), exit_code(SIGINT))
            return 0

        return run

    return decorate


def _run(main: Main, arguments: Sequence[str] | None) -> None:
    """Run it, and write what it printed: the disk, or what reads it, may refuse."""
    try:
        main(arguments)
    except SystemExit:  # --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _say(text: str, code: int) -> int:
    """Print the last line on stderr, if it can be, and return the exit code.

    One of several processes ends here, so that the others do not wait for it.
    """
    with suppress(popdist.DistributedError):  # that it is one cannot be: see `text`
        if popdist.getNumInstances() > 1:
            popdist.fail(text, code)
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    return code


def _failure(error: OSError) -> str:
    """One sentence about a file, disk or connection that fails where nobody foresaw it."""
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    return f"{shown_path(error.filename)}: {reason}" if error.filename else reason


@contextmanager
def _plain_notices() -> Iterator[None]:
    """Show notices without the place in the code that Python adds to warnings."""
    usual = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if issubclass(category, Notice):
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    def of_others(*_: object, **__: object) -> None:
        """The first of several processes has said it."""

    shown = warnings.showwarning
    warnings.formatwarning = formatwarning
    if not is_heard():
        warnings.showwarning = of_others
    try:
        yield
    finally:
        warnings.formatwarning, warnings.showwarning = usual, shown


def _meet(arguments: Sequence[str]) -> None:
    """Meet the other processes, if the arguments or the environment say that there are some.

    Raises:
        ConfigError, DistributedError: what they say cannot be, or the others do not come.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add_process_options(parser)
    given = parser.parse_known_args(arguments)[0]
    try:
        popdist.init(given.processes, given.process, given.coordinator)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes, unless popdist.run, mpirun or srun starts them"
    )
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="the host of process 0, and a free port of it"
    )


def _start(
    arguments: Sequence[str], presets: str | Path, default_preset: str, origins: Origins | None
) -> tuple[str, dict[str, Any]]:
    """What the flags are laid over, and its name. It decides what other flags there are."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add_config_options(parser, default_preset, origins)
    parser.add_argument("--load", "--checkpoint.load", dest="load", type=path_option)
    given = parser.parse_known_args(arguments)[0]
    evaluating = {"model": {"eval": True}} if presets == "inference" else {}
    if origins is not None and given.model is not None:
        how = None if given.config is None else preset_data(presets, given.config)
        name = given.config or given.model
        return name, merge(origins.with_model(given.model, how), evaluating)
    if given.config is not None:
        return given.config, preset_data(presets, given.config)
    if origins is not None and given.load is not None:
        saved = origins.saved(given.load)
        if saved is not None:
            return given.load, merge(saved, evaluating)
    return default_preset, preset_data(presets, default_preset)


def _add_config_options(
    parser: argparse.ArgumentParser, default_preset: str, origins: Origins | None
) -> None:
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="a preset, or the path of a run's config.yml "
        f"(default: the run that --load names, else {default_preset})",
    )
    if origins is not None:
        parser.add_argument(
            "--model",
            metavar="NAME",
            type=path_option,
            help="a T5 or GPT-J of Hugging Face, a folder or the hub's: its sizes, weights and "
            "tokenizer; --config then says how to run it",
        )


class _Parser(argparse.ArgumentParser):
    """A parser that leaves the ending of the program to `entry_point`."""

    def flags(self) -> list[str]:
        """The long flags added so far."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def names(self) -> list[str]:
        """The names under which the options added so far are found in the namespace."""
        return [action.dest for action in self._actions]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{shown_name(message, 200)}; see --help")
