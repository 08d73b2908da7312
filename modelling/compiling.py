"""A configured model's program, compiled: a wait that may be long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from config.cli import CommandLine
from config.screen import say
from config.sections import RunConfig
from modelling.running import RunningModel
from modelling.shortage import explained

Model = TypeVar("Model", bound=RunningModel)


def compiled(make: Callable[[RunConfig], Model], config: RunConfig, line: CommandLine) -> Model:
    """The model that `make` makes; says on the screen that it takes a while, and what it took.

    Args:
        line: what the person asked for, to name it in errors.

    Raises:
        UserError: too few devices, or too little memory.
    """
    say(f"compiling for {config.replicas} device{'s' if config.replicas > 1 else ''}")
    start = time.perf_counter()
    with explained(line):
        model = make(config)
    startup = model.session.startup
    how = "the executable came from the cache" if startup.from_cache else "compiled"
    say(
        f"ready after {time.perf_counter() - start:.1f} s: {how} "
        f"({startup.traces} traces, {startup.compiles} compilations)"
    )
    return model
