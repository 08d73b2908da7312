"""Choosing between the two programs that generate: resident weights, or layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from config.sections import RunConfig
from modelling.devices import device_desc
from modelling.generation.resident_program import GenerationProgram, build_resident
from modelling.generation.search import DecodingStrategy
from modelling.generation.streamed_program import build_streamed
from modelling.generation.token_by_token import build_token_by_token
from planning.hardware.disk_offload import usable_host_bytes
from planning.hardware.memory_check import NotEnoughMemoryError, check_memory

if TYPE_CHECKING:
    from modelling.spec import ModelFamily


def build_generation_program(
    config: RunConfig,
    family: ModelFamily,
    strategy: DecodingStrategy,
    shared_bytes: int | None = None,
    token_by_token: bool = False,
) -> GenerationProgram:
    """The program that `generation.weights` asks for; auto: the resident one if it fits, else the
    streamed one.

    Args:
        config: with `model.eval` set.
        shared_bytes: see `planning.hardware.memory_check.check_memory`.
        piecewise: each run of the resident program writes one token.

    Raises:
        DeviceError: fewer devices than replicas.
    """
    wanted = config.generation.weights
    if wanted != "streamed":
        build = build_token_by_token if token_by_token else build_resident
        resident = build(config, family.generator, strategy)
        if wanted != "auto" or _fits(resident, config, shared_bytes):
            return resident
    return build_streamed(config, family.generator, family.weight_map(config), strategy)


def _fits(program: GenerationProgram, config: RunConfig, shared_bytes: int | None) -> bool:
    try:
        check_memory(
            program.ir, device_desc(config), shared_bytes, host_bytes=usable_host_bytes(config)
        )
    except NotEnoughMemoryError:
        return False
    return True
