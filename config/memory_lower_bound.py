"""Lower bound on the memory of a run, computed from tensor sizes alone.

Nothing is built from the sizes yet, so sizes that no memory can hold are refused at once. What a
program needs exactly is computed from the program (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from config.errors import ConfigError

MAX_BYTES = 2**50
"""A petabyte: more than any host has, or anybody plans for."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_fits_any_machine(required_bytes: Mapping[str, int]) -> None:
    """Raises ConfigError if a run needs more memory than any machine can have."""
    what, most = max(required_bytes.items(), key=lambda item: item[1])
    if most > MAX_BYTES:
        raise ConfigError(
            f"{what} would take {_format_size(most)} of memory: lower the sizes that they are the "
            "product of"
        )


def _format_size(count: int) -> str:
    return f"{count / 1e12:.3g} TB" if count < 10**30 else "more than 10^18 TB"
