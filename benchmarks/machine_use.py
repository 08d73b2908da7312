"""How much of a machine a benchmark uses: its matrix units and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import popxl
from config.sections import RunConfig
from machine.devices import device_desc
from machine.matrix_rate import matrix_rate
from planning.needs import Needs
from run.records.pace import peak_host_bytes


@dataclass(frozen=True)
class MachineUse:
    """What a measured program gets out of its machine.

    Attributes:
        model_flops_per_second: operations of matrix products that the model needs, nothing computed
            twice, on all devices together; a product with an addition counts as two.
        of_matrix_rate: the part that this is of what the same devices do when they multiply large
            matrices of the model's type.
        peak_host_bytes: of this process so far; None on Windows, which does not tell.
    """

    model_flops_per_second: float
    of_matrix_rate: float
    peak_host_bytes: int | None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        needs_of: Callable[[RunConfig], Needs],
        samples_per_second: float,
    ) -> MachineUse:
        """What a program uses that works on so many samples. Multiplies matrices for a second."""
        peak = peak_host_bytes()
        execution = replace(
            config.execution, activations="keep", attention_serialisation=1, attention="scores"
        )
        needs = needs_of(replace(config, execution=execution))
        flops = needs.flops_per_sample * samples_per_second
        dtype = popxl.dtype.from_name(config.model.precision)
        rate = matrix_rate(device_desc(config), dtype, config.replicas)
        return cls(flops, flops / rate, peak)
