"""Status lines, progress bars and protected standard streams."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import popdist

if TYPE_CHECKING:
    from tqdm import tqdm


def is_first_process() -> bool:
    """Returns whether this is process 0 of the run, which prints for all processes."""
    try:
        return popdist.getInstanceIndex() == 0
    except popdist.DistributedError:  # this process has to report it
        return True


def say(text: str) -> None:
    """Prints a line to standard error, above a progress bar; only process 0 prints."""
    if not is_first_process():
        return
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)


def progress_bar(
    description: str, total: int, unit: str, completed: int = 0, quiet: bool = False
) -> tqdm:
    """Returns a progress bar, which is shown only on terminals.

    Args:
        description: text before the bar; "": none.
        completed: units that are done.
    """
    from tqdm import tqdm  # on demand: `say` need not load it

    return tqdm(
        desc=description or None, total=total, initial=completed, unit=unit, leave=False,
        dynamic_ncols=True, disable=quiet or not is_first_process() or None,
    )  # fmt: skip


def drop_torch_advice(record: logging.LogRecord) -> bool:
    """Log filter that drops the message of transformers that PyTorch is missing."""
    return not record.getMessage().startswith("PyTorch was not found")


class _FaultTolerantStream:
    """An output stream that discards text once its reader, terminal or disk is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        if self.failure is None:
            self._write_or_discard(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        if self.failure is None:
            self._write_or_discard(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_or_discard(self, write_or_flush: Callable[[], object]) -> None:
        try:
            write_or_flush()
        except OSError as error:
            self.failure = error
            with suppress(OSError):  # else Python's last flush fails, and changes the exit code
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def tolerate_broken_streams() -> Iterator[None]:
    """Context in which broken standard output and error do not end the program.

    A warning at the end says that lines are missing.
    """
    names = {"stdout": "output", "stderr": "error"}
    usual = {name: getattr(sys, name) for name in names}
    ours = {name: _FaultTolerantStream(stream) for name, stream in usual.items()}
    for name, stream in ours.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name in names:
            if getattr(sys, name) is ours[name]:
                setattr(sys, name, usual[name])
        for name, failure in ((n, s.failure) for n, s in ours.items() if s.failure is not None):
            left = next((ours[n] for n in names if ours[n].failure is None), None)
            if left is not None:
                reason = failure.strerror or str(failure)
                left.write(f"warning: standard {names[name]} broke: {reason}; lines are missing\n")
                left.flush()


def supports_color() -> bool:
    """Returns whether standard error supports colors (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stderr.isatty() and not plain


def reopen_closed_streams() -> None:
    """Opens closed standard streams (`2>&-`) on the null device.

    Otherwise the next opened file, such as a checkpoint, would become standard error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - takes the lowest number that is free
            setattr(sys, name, stream)
