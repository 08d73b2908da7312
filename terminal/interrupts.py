"""Signal handling: on signals such as SIGINT (Ctrl-C) the program ends with one sentence.

Python runs a signal's handler when the main thread is back in Python. A compilation or a step on
the devices may keep it away for minutes, so a second thread watches: if the handler has not run
after a moment, it ends the process in its place. What is written half then has a hidden name, as
after a kill.

Python drops exceptions that a handler raises inside a destructor or a callback of the garbage
collector, and JAX has both; in that case the signal is sent once more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import popdist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a program to end: from a person, a scheduler, a terminal that closes."""
SECONDS_TO_ANSWER = 1.5
SECONDS_TO_END = 20.0
"""From a signal that Python has answered to the end. A thread that a file system holds holds up
whoever waits for it, and Python's own end."""
DUPLICATE_WINDOW = 3.0
"""Seconds in which a signal that comes again is the same one: `scancel` signals the tasks itself,
and `srun` hands on what it got."""
SECONDS_TO_RETURN = 0.05  # from a destructor
RETRY_OFFSET = 128  # added to the number of a signal that is to be sent once more


class Interrupted(BaseException):
    """Raised by a signal that ends the program; `except Exception` does not catch it."""

    def __init__(self, signal_number: int, text: str | None = None) -> None:
        self.number = signal_number
        super().__init__(text or signal_message(signal_number))


def signal_message(signal_number: int) -> str:
    """Returns the last line that the program prints after a signal."""
    return f"interrupted by {signal.Signals(signal_number).name}: what was saved before is intact"


def signal_exit_code(signal_number: int) -> int:
    """Returns the exit code for a signal, 128 + its number as in shells."""
    return 128 + signal_number


@contextmanager
def handle_signals() -> Iterator[None]:
    """Context in which `SIGNALS` raise `Interrupted`, or end the process.

    They end the process where Python cannot raise in time. A handler set inside the context, such
    as that of `run.stop_signal.StopSignal`, takes precedence. Outside the main thread, and
    for signals that are ignored, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {n: signal.getsignal(n) for n in SIGNALS}
    ours = [n for n in SIGNALS if previous[n] not in (signal.SIG_IGN, None)]
    timers: list[threading.Timer] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    answered = threading.Event()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        answered.set()
        timers.append(kill_process_after(SECONDS_TO_END, signal_number))
        if _is_importing(frame):  # an extension that is half initialised, as JAX's, would crash
            popdist.fail(signal_message(signal_number), signal_exit_code(signal_number))
        raise Interrupted(signal_number)

    hook = sys.unraisablehook

    def resend_signal(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        answered.clear()
        os.write(writer, bytes([RETRY_OFFSET + unraisable.exc_value.number]))

    watch = threading.Thread(
        target=_watch_for_signals, args=(reader, handle, answered), name="signals", daemon=True
    )
    watch.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    sys.unraisablehook = resend_signal
    try:
        for number in ours:
            signal.signal(number, handle)
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number in ours:
            signal.signal(number, previous[number])
        sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread
        watch.join()


def kill_process_after(seconds: float, signal_number: int) -> threading.Timer:
    """Starts a timer that ends the process unless it ends or cancels the timer in time."""
    timer = threading.Timer(
        seconds, popdist.fail, (signal_message(signal_number), signal_exit_code(signal_number))
    )
    timer.daemon = True
    timer.start()
    return timer


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether the signal interrupted the import of a module."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _watch_for_signals(reader: int, handle: object, answered: threading.Event) -> None:
    """Ends the process for a signal that its handler does not answer in time."""
    received, last, since = 0, 0, 0.0
    while byte := os.read(reader, 1):
        number = byte[0]
        if number == last and time.monotonic() - since < DUPLICATE_WINDOW:
            continue
        last, since = number, time.monotonic()
        if number > RETRY_OFFSET:
            time.sleep(SECONDS_TO_RETURN)
            os.kill(os.getpid(), number - RETRY_OFFSET)
        if number not in SIGNALS:
            continue
        received += 1
        # A handler that notes the first signal and ends soon may finish; a second signal ends the
        # process.
        if (signal.getsignal(number) is handle or received > 1) and not answered.wait(
            SECONDS_TO_ANSWER
        ):
            popdist.fail(signal_message(number), signal_exit_code(number))
    os.close(reader)
