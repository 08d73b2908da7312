"""A configured model's program, compiled: a wait that may be long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from modelling.sessions.running import RunningModel
from terminal.screen import say

Model = TypeVar("Model", bound=RunningModel)


def compiled(make: Callable[[], Model], what: str) -> Model:
    """The model that `make` makes; says on the screen that it takes a while, and what it took.

    Args:
        what: the program, for people.
    """
    say(f"compiling {what}")
    start = time.perf_counter()
    model = make()
    startup = model.session.startup
    how = "the executable came from the cache" if startup.from_cache else "compiled"
    say(
        f"ready after {time.perf_counter() - start:.1f} s: {how} "
        f"({startup.traces} traces, {startup.compiles} compilations)"
    )
    return model
