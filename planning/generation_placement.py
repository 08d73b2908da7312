"""The choice between generation with weights resident on the device and with streamed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from config.sections import RunConfig
from modelling.devices import resolve_device_desc
from modelling.generation.resident_program import GenerationProgram, build_resident_program
from modelling.generation.search import DecodingStrategy
from modelling.generation.streamed_program import build_streamed_program
from modelling.generation.token_by_token import build_token_by_token_program
from planning.hardware.disk_offload import usable_host_bytes
from planning.hardware.memory_check import NotEnoughMemoryError, check_memory

if TYPE_CHECKING:
    from modelling.model_family import ModelFamily


def build_generation_program(
    config: RunConfig,
    family: ModelFamily,
    strategy: DecodingStrategy,
    shared_bytes: int | None = None,
    token_by_token: bool = False,
) -> GenerationProgram:
    """Build the resident or the streamed program, by `generation.weights` or by free memory.

    Args:
        config: needs `model.eval`.
        shared_bytes: see `planning.hardware.memory_check.check_memory`.
        token_by_token: each run of the resident program generates one token.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    weights = config.generation.weights
    if weights != "streamed":
        build = build_token_by_token_program if token_by_token else build_resident_program
        resident = build(config, family.generator, strategy)
        if weights != "auto" or _fits_memory(resident, config, shared_bytes):
            return resident
    return build_streamed_program(config, family.generator, family.weight_map(config), strategy)


def _fits_memory(program: GenerationProgram, config: RunConfig, shared_bytes: int | None) -> bool:
    try:
        check_memory(
            program.ir,
            resolve_device_desc(config),
            shared_bytes,
            host_bytes=usable_host_bytes(config),
        )
    except NotEnoughMemoryError:
        return False
    return True
