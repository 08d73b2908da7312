"""Launcher: starts several processes of one program on this machine.

    python3 -m popdist.run --processes 4 -- python3 run_finetuning.py --config tiny

They meet on 127.0.0.1; nothing listens on another address. Signals are forwarded to all processes.
When one fails, the others are killed, and the last line names it. Standard input goes to process 0.
The exit code is that of the first process to fail, 128 + N for signal N, or 0.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from popdist._coordinator_monitor import FOLLOWED_PEER, LAUNCHER, PEER_LOST
from popdist._process_info import (
    COORDINATOR,
    DEFAULT_SILENCE,
    INSTANCE_INDEX,
    LOOPBACK,
    NUM_INSTANCES,
    RUN,
    SECRET,
    SILENCE,
    TOTAL_REPLICAS,
    DistributedError,
    silence_timeout,
)

GRACE = 5.0  # seconds for the other processes to end by themselves
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_USER_ERROR = 2
MAX_PROCESSES = 1024  # processes on one machine, and replicas


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes, waits for them, and returns the exit code."""
    try:
        args = _create_parser().parse_args(arguments)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it at its end
        return _print_error(f"standard output: {error.strerror}", _USER_ERROR)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        return _print_error("give the command to start after --", _USER_ERROR)
    for name, count in (("--processes", args.processes), ("--replicas", args.replicas)):
        if count is not None and not 1 <= count <= MAX_PROCESSES:
            return _print_error(
                f"{name} is {str(count)[:20]}, but must be from 1 to {MAX_PROCESSES}", _USER_ERROR
            )
    if args.silence is not None:
        os.environ[SILENCE] = str(args.silence)
    try:
        silence_timeout()
    except DistributedError as error:
        return _print_error(str(error), _USER_ERROR)
    started: list[subprocess.Popen[bytes]] = []

    def forward_signal(signal_number: int, frame: object) -> None:
        for process in started:
            process.send_signal(signal_number)

    for number in _FORWARDED:
        signal.signal(number, forward_signal)
    run = {
        COORDINATOR: f"{LOOPBACK}:{_find_free_port()}",
        RUN: secrets.token_hex(8),
        SECRET: secrets.token_hex(32),
    }
    try:
        for index in range(args.processes):
            started.append(_start_process(command, index, args, run))
    except OSError as error:
        _kill_all(started)
        return _print_error(f"cannot start {command[0]!r}: {error.strerror}", _USER_ERROR)
    return _wait_for_processes(started)


class _LauncherParser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        """Prints the help like argparse, but fails if standard output cannot be written."""
        print(self.format_help(), end="", file=file, flush=True)


def _create_parser() -> _LauncherParser:
    parser = _LauncherParser(prog="python3 -m popdist.run", description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--replicas", type=int, metavar="N",
        help="replicas of all processes, for programs that ask popdist for their number",
    )  # fmt: skip
    parser.add_argument(
        "--silence", metavar="SECONDS",
        help="a process that is silent for longer ends the run, as one that is paused; sets "
        f"{SILENCE} (default: {DEFAULT_SILENCE})",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the program to start")
    return parser


def _start_process(
    command: Sequence[str], index: int, args: argparse.Namespace, run_environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    env = os.environ | {
        NUM_INSTANCES: str(args.processes),
        INSTANCE_INDEX: str(index),
        LAUNCHER: str(os.getpid()),
        **run_environment,
    }
    if args.replicas is not None:
        env[TOTAL_REPLICAS] = str(args.replicas)
    # A terminal sends its signals to this process's group; the others get them from here, once.
    return subprocess.Popen(
        command, env=env, start_new_session=True, stdin=None if index == 0 else subprocess.DEVNULL
    )


def _wait_for_processes(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while codes := [p.poll() for p in processes]:
        if any(codes):
            return _report_failure(processes)
        if None not in codes:
            break
        time.sleep(0.02)
    return 0


def _report_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Kills the remaining processes of the run, and prints which process failed first."""
    end = time.monotonic() + GRACE
    while (first := _first_failed_process(processes)) is None and time.monotonic() < end:
        time.sleep(0.02)  # those that follow may end before the one they follow
    silent = [str(i) for i, process in enumerate(processes) if process.poll() is None]
    _kill_all(processes, grace=0.0 if first is None else GRACE)
    count = len(processes)
    if first is None:
        if not silent:
            return PEER_LOST  # each has said why
        who = f"process {silent[0]}" if len(silent) == 1 else f"processes {', '.join(silent)}"
        return _print_error(
            f"nothing is heard of {who} of {count} for {silence_timeout()} s ({SILENCE}): "
            "the others ended first",
            PEER_LOST,
        )
    code = processes[first].returncode
    if code > 0 and all(p.returncode == code for p in processes):
        return code  # all failed in the same way, and printed why
    if code > 0:
        return _print_error(f"process {first} of {count} ended with code {code}", code)
    cause = f"was ended by {signal.Signals(-code).name}"
    return _print_error(f"process {first} of {count} {cause}, and the others with it", 128 - code)


def _first_failed_process(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Returns the first process that failed by itself, not because of another; None if none did.

    Of several that have ended within a moment it is one that a signal ended: no other can be the
    cause of that.
    """
    codes = [process.poll() for process in processes]
    failed = [(code > 0, i) for i, code in enumerate(codes) if code not in (None, 0, FOLLOWED_PEER)]
    return min(failed)[1] if failed else None


def _kill_all(processes: Sequence[subprocess.Popen[bytes]], grace: float = 0.0) -> None:
    end = time.monotonic() + grace
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        time.sleep(0.02)
    for process in processes:
        process.kill()  # nothing that is saved can be damaged by that
        process.wait()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _print_error(message: str, exit_code: int) -> int:
    print(f"popdist.run: {message}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
