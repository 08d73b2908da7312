"""A configured model in a session: what training and generation have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self, TypeVar

import numpy as np

import popdist
import popxl
from config.sections import RunConfig
from modelling.devices import device_desc
from modelling.memory import check_memory
from terminal.screen import say


class RunningModel:
    """A compiled program of a model. Entering it brings the weights to the devices, and leaving it
    drops them: nothing of them stays on the host, whose memory may be full of them.

    Raises:
        DeviceError: fewer devices than data_parallel x tensor_parallel.
        NotEnoughMemoryError: the state of the program does not fit.
    """

    def __init__(self, config: RunConfig, ir: popxl.Ir) -> None:
        """Compile `ir`."""
        self.config = config
        check_memory(ir, device_desc(config))
        self.session = popxl.Session(ir, device_desc(config), weights_to_host_on_exit=False)

    def _run(
        self, inputs: popxl.session.h2dStreamBufferMaps
    ) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """Run the program once. All processes do so together.

        Args:
            inputs: data for the replicas of this process.

        Returns:
            What each stream gave on the replicas of all processes: (transfers, replicas, ...).
        """
        transfers = self.session.ir.num_host_transfers
        own = {
            stream: found.reshape(transfers, -1, *stream.shape)
            for stream, found in self.session.run(inputs).items()
        }
        if popdist.getNumInstances() == 1:
            return own
        packed = np.concatenate([x.reshape(-1).view(np.uint8) for x in own.values()])
        ends = np.cumsum([x.nbytes for x in own.values()])[:-1]
        parts = np.split(self.session.gather(packed), ends, axis=1)
        return {
            stream: np.concatenate([p.view(x.dtype).reshape(x.shape) for p in everyones], 1)
            for (stream, x), everyones in zip(own.items(), parts, strict=True)
        }

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.__exit__(*exc)


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
