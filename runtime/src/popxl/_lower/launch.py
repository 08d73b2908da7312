"""Launching executables from several threads, so that a CPU runs several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

_HELPERS = 2  # threads that launch by turns with the caller's
_WORTHWHILE = 4 * 2**20  # bytes: reading them takes longer than handing over a launch


class Turns:
    """Launches from several threads by turns.

    XLA's CPU client runs what one thread launches one after the other, whether or not it depends on
    each other: cores that an executable leaves idle stay idle. What different threads launch is
    ordered by its data alone. So with n threads each executable waits for what it takes and for
    the n-th before it, and up to n run at a time.
    """

    def __init__(self) -> None:
        self._count = 0

    def launch(
        self, executable: Any, arguments: Sequence[jax.Array], nbytes: int
    ) -> Sequence[jax.Array]:
        """Launch from the thread whose turn it is.

        Args:
            nbytes: of arguments and results. What moves little is launched by the caller at once.
        """
        if nbytes >= _WORTHWHILE:
            self._count += 1
            turn = self._count % (_HELPERS + 1)
            if turn:
                return _helpers()[turn - 1].submit(executable, *arguments).result()
        return executable(*arguments)


@cache
def _helpers() -> list[ThreadPoolExecutor]:
    """One thread each; all programs of the process share them."""
    return [ThreadPoolExecutor(1, thread_name_prefix="popxl-launch") for _ in range(_HELPERS)]
