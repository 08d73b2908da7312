"""Serialization of compiled segments, without pickle and without tracing again.

XLA serializes an executable to bytes. Everything else that JAX keeps with it (order, shapes and
shardings of arguments and results) follows from the segment, so it is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.interpreters.pxla import global_aval_to_result_handler
from jax.core import ShapedArray

Specs = tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]  # arguments, results


def serialize_executable(specs: Specs, compiled: Any) -> bytes:
    """Returns the executable of a `jax.stages.Compiled` as bytes.

    Raises:
        ValueError: its arguments are not those of the segment.
    """
    executable = compiled.runtime_executable()
    parameters, expected = len(executable.get_parameter_layouts()), len(specs[0])
    if parameters != expected:
        raise ValueError(f"it takes {parameters} arguments, but the segment has {expected}")
    return executable.serialize()


def executable_signature(specs: Specs) -> dict[str, list[list[Any]]]:
    """Returns [shape, dtype, memory kind] of each argument and result of an executable."""
    return {
        name: [[list(s.shape), str(s.dtype), s.sharding.memory_kind] for s in part]
        for name, part in zip(("arguments", "results"), specs, strict=True)
    }


class LoadedSegment:
    """An executable deserialized from bytes; called like a `jax.stages.Compiled`."""

    def __init__(self, specs: Specs, devices: Sequence[Any], payload: bytes) -> None:
        """Deserializes an executable.

        Args:
            specs: of the segment that it was compiled from.
            payload: from `serialize_executable`. Loading it may run any code: it must be trusted.

        Raises:
            Exception: XLA cannot load it on these devices.
        """
        self._executable = devices[0].client.deserialize_executable(payload, list(devices))
        self._arguments, results = specs
        kinds = self._executable.get_output_memory_kinds()[0]
        expected = [s.sharding.memory_kind for s in results]
        if list(kinds) != expected:
            raise ValueError(
                f"results are in memories {kinds}, but the segment puts them in {expected}"
            )
        # As JAX's own executables make their results; the public way is slower.
        self._handlers = [
            global_aval_to_result_handler(ShapedArray(s.shape, s.dtype), s.sharding, True)
            for s in results
        ]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Runs the segment; takes and returns arrays like the compiled original.

        Raises:
            TypeError: an argument has another shape, dtype or sharding.
        """
        self._check_arguments(arrays)
        results: list[jax.Array] = self._executable.execute_sharded(arrays).consume_with_handlers(
            self._handlers
        )
        return results

    def _check_arguments(self, arrays: Sequence[jax.Array]) -> None:
        # XLA trusts its caller: a wrong buffer would be read as if it were the right one.
        for x, s in zip(arrays, self._arguments, strict=True):
            if x.shape != s.shape or x.dtype != s.dtype or not _has_sharding(x, s):
                raise TypeError(
                    f"the segment takes {s.dtype}{s.shape} in {s.sharding}, but got "
                    f"{x.dtype}{x.shape} in {x.sharding}"
                )

    def as_text(self) -> str:
        """Returns the executable's optimized HLO text."""
        return "\n".join(m.to_string() for m in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """Returns XLA's memory statistics, as `jax.stages.Compiled` does."""
        return self._executable.get_compiled_memory_stats()

    def runtime_executable(self) -> Any:
        """Returns the loaded XLA executable."""
        return self._executable


def _has_sharding(x: jax.Array, s: jax.ShapeDtypeStruct) -> bool:
    """True if an array already has the sharding that an executable's argument requires."""
    at, expected = x.sharding, s.sharding
    return at is expected or at == expected or at.is_equivalent_to(expected, x.ndim)
