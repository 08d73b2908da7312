"""Stand-ins for PopART objects that programs reach through private names of a session.

Some applications keep a session attached by hand: they share its `_device` with another one, and
load the engine through its `_pb_session`. XLA's devices need no attaching, so only what loads and
fetches variables does something here.
"""

from __future__ import annotations

import weakref
from typing import Any


class DeviceInfo:
    """Stand-in for PopART's device, shared by the sessions that use it."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def isAttached(self) -> bool:  # noqa: N802 - PopART's name
        """True if a session that uses this device has its variables there."""
        return any(session.is_attached for session in self._sessions)

    def attach(self) -> bool:
        """Does nothing: devices are free for all sessions."""
        return True

    def detach(self) -> None:
        """Does nothing: leaving a session frees its memory."""


class SessionHandle:
    """Stand-in for PopART's session binding."""

    def __init__(self, session: Any) -> None:
        self._session = weakref.proxy(session)

    def prepareDevice(self, loadEngine: bool = True) -> None:  # noqa: N802, N803
        """Loads the variables to the devices, as entering the session does."""
        if loadEngine:
            self.loadEngineAndConnectStreams()

    def loadEngineAndConnectStreams(self) -> None:  # noqa: N802
        """Loads the variables to the devices, like `prepareDevice`."""
        self._session._attach()

    def setRandomSeed(self, seedValue: int) -> None:  # noqa: N802, N803
        """Sets the seed of stochastic rounding.

        Raises:
            ValueError: the seed is not in [0, 2**64).
        """
        self._session._seed_random_numbers(seedValue)

    def weightsFromHost(self) -> None:  # noqa: N802
        """Calls `Session.weights_from_host`."""
        self._session.weights_from_host()

    def weightsToHost(self) -> None:  # noqa: N802
        """Calls `Session.weights_to_host`."""
        self._session.weights_to_host()
