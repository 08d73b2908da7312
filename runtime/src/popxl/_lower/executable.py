"""A compiled program as bytes and back, without pickle and without tracing.

XLA serialises an executable to bytes by itself. What JAX keeps beside it (order, shapes and
shardings of arguments and results) follows from the program, so nothing else has to be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from popxl._lower.program import Program


def serialize(program: Program, compiled: Any) -> bytes:
    """The executable of a `jax.stages.Compiled` as bytes.

    Raises:
        ValueError: its arguments are not those of the program.
    """
    executable = compiled.runtime_executable()
    found, known = len(executable.get_parameter_layouts()), len(signature(program)["arguments"])
    if found != known:
        raise ValueError(f"it takes {found} arguments, but the program has {known}")
    return executable.serialize()


def signature(program: Program) -> dict[str, list[list[Any]]]:
    """Arguments and results in the order of the executable: [shape, dtype, memory kind] of each."""
    return {
        "arguments": [_describe(s) for s in jax.tree.leaves(program.argument_specs)],
        "results": [_describe(s) for s in jax.tree.leaves(program.result_specs)],
    }


def _describe(spec: jax.ShapeDtypeStruct) -> list[Any]:
    return [list(spec.shape), str(spec.dtype), spec.sharding.memory_kind]


class LoadedProgram:
    """An executable made from bytes; called like the `Compiled` that it was."""

    def __init__(self, program: Program, payload: bytes) -> None:
        """
        Args:
            program: the program it was compiled from (equal, not necessarily the same object).
            payload: from `serialize`. Loading it may run any code: it must be trusted.

        Raises:
            Exception: XLA cannot load it on these devices.
        """
        devices = list(program.mesh.devices.flat)
        self._executable = devices[0].client.deserialize_executable(payload, devices)
        self._arguments, self._argument_tree = jax.tree.flatten(program.argument_specs)
        self._results, self._result_tree = jax.tree.flatten(program.result_specs)
        kinds = self._executable.get_output_memory_kinds()[0]
        wanted = [s.sharding.memory_kind for s in self._results]
        if list(kinds) != wanted:
            raise ValueError(
                f"results are in memories {kinds}, but the program puts them in {wanted}"
            )

    def __call__(self, *args: Any) -> Any:
        """Run on the arguments of `Program.function`; the first is donated.

        Raises:
            TypeError: the arguments have another structure, shape, dtype or sharding.
        """
        arrays, tree = jax.tree.flatten(args)
        if tree != self._argument_tree:
            raise TypeError(f"the program takes {self._argument_tree}, but was called with {tree}")
        self._check(arrays)
        results = self._executable.execute_sharded(arrays)
        parts = results.disassemble_into_single_device_arrays()
        whole = [
            jax.make_array_from_single_device_arrays(s.shape, s.sharding, p)
            for s, p in zip(self._results, parts, strict=True)
        ]
        return jax.tree.unflatten(self._result_tree, whole)

    def _check(self, arrays: Sequence[jax.Array]) -> None:
        # XLA trusts its caller: a wrong buffer would be read as if it were the right one.
        for x, s in zip(arrays, self._arguments, strict=True):
            if (x.shape, x.dtype) != (s.shape, s.dtype) or x.sharding != s.sharding:
                raise TypeError(
                    f"the program takes {s.dtype}{s.shape} in {s.sharding}, but got "
                    f"{x.dtype}{x.shape} in {x.sharding}"
                )

    def as_text(self) -> str:
        """The optimised HLO."""
        return "\n".join(m.to_string() for m in self._executable.hlo_modules())

    def memory_analysis(self) -> Any:
        """XLA's account of memory, as of `jax.stages.Compiled`."""
        return self._executable.get_compiled_memory_stats()

    def runtime_executable(self) -> Any:
        """XLA's executable."""
        return self._executable
