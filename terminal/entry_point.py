"""Entry points of scripts: exit codes, and one sentence per user error.

A script is a short main:

    @entry_point()
    def main(arguments: Sequence[str] | None = None) -> None:
        line = read_command_line(__doc__, "finetuning", arguments)
        ...

    if __name__ == "__main__":
        sys.exit(main())
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from signal import SIGINT
from typing import Protocol, TextIO

import popdist
from config.errors import ConfigError, UserError, UserNotice
from files.formatting import format_path, format_sentence
from terminal.environment import check_environment, use_default_cache
from terminal.interrupts import (
    SECONDS_TO_END,
    Interrupted,
    handle_signals,
    kill_process_after,
    signal_exit_code,
    signal_message,
)
from terminal.parser import Parser, add_process_options
from terminal.screen import drop_torch_advice, is_first_process, reopen_closed_streams

USER_ERROR = 2
_HELP = {"-h", "--help"}
LONGEST = 300
"""Characters of a message; in a longer one, paths and other long words are shortened."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
NOBODY_READS = 141  # 128 + SIGPIPE, as shells count


class Main(Protocol):
    """Protocol of a script's main function; by default it reads the process's arguments."""

    def __call__(self, arguments: Sequence[str] | None = None) -> None: ...


class EntryPoint(Protocol):
    """Protocol of a main function that returns an exit code."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


def entry_point(
    *user_errors: type[Exception],
    single_process: bool = False,
    caches: bool = False,
) -> Callable[[Main], EntryPoint]:
    """Decorates a main function to return an exit code and print user errors as one sentence.

    `UserError`, and what `user_errors` names, end with the message on stderr and code 2, and so do
    a file or disk that fails and memory that runs out. SIGINT ends with code 130, SIGTERM with
    143. Every other exception is a defect of ours and keeps its traceback. A `UserNotice` is shown
    as one line.

    Args:
        single_process: the script is never one of several processes; it may start some itself.
        caches: the script uses the cache of executables unless a person switches it off.
    """

    expected: tuple[type[Exception], ...] = (UserError, popdist.DistributedError, *user_errors)

    def decorate(main: Main) -> EntryPoint:
        @functools.wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            is_script = getattr(sys.modules["__main__"], "main", None) is run
            if is_script and not (single_process or _HELP.intersection(sys.argv)):
                from terminal.huge_pages import restart_with_huge_pages

                restart_with_huge_pages()
            reopen_closed_streams()
            logging.getLogger("transformers").addFilter(drop_torch_advice)
            try:
                with handle_signals(), _format_notices_plainly():
                    check_environment()
                    if caches:
                        use_default_cache()
                    if not single_process:
                        _join_process_group(sys.argv[1:] if arguments is None else arguments)
                    _run_and_flush(main, arguments)
            except expected as error:
                return _print_last_line(
                    f"error: {format_sentence(str(error), LONGEST)}", USER_ERROR
                )
            except BrokenPipeError:  # such as `| head`
                _redirect_stdout_to_null()
                if popdist.getNumInstances() > 1:  # the others must not wait for this one
                    popdist.exit_process(NOBODY_READS)
                return NOBODY_READS
            except OSError as error:
                return _print_last_line(f"error: {_describe_os_error(error)}", USER_ERROR)
            except MemoryError as error:
                what = " ".join(str(error).split()) or "an array does not fit"
                return _print_last_line(f"error: there is not enough memory: {what}", USER_ERROR)
            except Interrupted as signal:
                if is_script:
                    kill_process_after(SECONDS_TO_END, signal.number)
                return _print_last_line(str(signal), signal_exit_code(signal.number))
            except KeyboardInterrupt:  # before, or where signals are somebody else's
                return _print_last_line(signal_message(SIGINT), signal_exit_code(SIGINT))
            return 0

        return run

    return decorate


def _run_and_flush(main: Main, arguments: Sequence[str] | None) -> None:
    """Runs a main function and flushes its output, which fails if the disk is full."""
    try:
        main(arguments)
    except SystemExit:  # --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _redirect_stdout_to_null() -> None:
    """Redirects broken standard output to the null device.

    Otherwise Python's last flush would change the exit code.
    """
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def _is_broken_stream(stream: TextIO) -> bool:
    """Returns whether an output stream accepts no more bytes."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def _print_last_line(text: str, code: int) -> int:
    """Prints the last line to stderr if possible; returns the exit code.

    One of several processes ends here, so that the others do not wait for it.
    """
    with suppress(popdist.DistributedError):  # `text` already reports that error
        if popdist.getNumInstances() > 1:
            popdist.fail(text, code)
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    return code


def _describe_os_error(error: OSError) -> str:
    """Returns one sentence about a file, disk or connection error."""
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    if error.filename is None and error.errno in _FULL and _is_broken_stream(sys.stdout):
        _redirect_stdout_to_null()
        return f"standard output: {reason}"
    return f"{format_path(error.filename)}: {reason}" if error.filename else reason


@contextmanager
def _format_notices_plainly() -> Iterator[None]:
    """Context in which `UserNotice` warnings are printed without a source location."""
    usual = warnings.formatwarning

    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if issubclass(category, UserNotice):
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    def ignore_warning(*_: object, **__: object) -> None:
        """Print no warning, as process 0 prints it."""

    show_warning = warnings.showwarning
    warnings.formatwarning = formatwarning
    if not is_first_process():
        warnings.showwarning = ignore_warning
    try:
        yield
    finally:
        warnings.formatwarning, warnings.showwarning = usual, show_warning


def _join_process_group(arguments: Sequence[str]) -> None:
    """Connects to the other processes of a run, if arguments or environment variables name them.

    Raises:
        ConfigError, DistributedError: these are invalid, or the others do not come.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    add_process_options(parser)
    given = parser.parse_known_args(arguments)[0]
    try:
        popdist.init(given.processes, given.process, given.coordinator)
    except ValueError as error:
        raise ConfigError(str(error)) from error
