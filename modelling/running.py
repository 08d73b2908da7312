"""A configured model in a session: what training and generation have in common."""

from __future__ import annotations

from typing import Self

import popxl
from config.sections import RunConfig
from modelling.devices import device_desc
from modelling.memory import check_memory


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

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.__exit__(*exc)
