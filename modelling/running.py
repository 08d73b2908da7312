"""A configured model in a session: what training and generation have in common."""

from __future__ import annotations

import base64
from typing import Self

import numpy as np

import popdist
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
        texts = {s.tensor_id: base64.b64encode(x.tobytes()).decode() for s, x in own.items()}
        everyones = popdist.gather(texts)

        def of_all(stream: popxl.DeviceToHostStream) -> np.ndarray:
            parts = (base64.b64decode(found[stream.tensor_id]) for found in everyones)
            x = own[stream]
            return np.concatenate([np.frombuffer(p, x.dtype).reshape(x.shape) for p in parts], 1)

        return {stream: of_all(stream) for stream in own}

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.__exit__(*exc)
