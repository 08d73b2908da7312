"""Environment variables for debugging a program; "" and 0 mean off.

Those of the cache are in `popxl._compile.executable_cache`. All processes of a program must have
the same values.
"""

from __future__ import annotations

import os

VERIFY = "POPXL_VERIFY"
"""Check the graphs when a session is made (`popxl._analysis.verify`)."""

STEPWISE = "POPXL_STEPWISE"
"""Wait for each step of the schedule before the next one. Nothing is donated, dispatched ahead of
its turn, read ahead, or written behind."""

STEPS = "POPXL_STEPS"
"""Write each step of the schedule to standard error before it is done."""

CHECK = "POPXL_CHECK"
"""Stop a run whose ops make what is not finite: "nan", or "inf" for both."""


def is_debug_flag_set(flag: str) -> bool:
    """True if a debugging environment variable is set; "" and 0 mean off."""
    return os.environ.get(flag, "0") not in ("", "0")


def nonfinite_check_mode() -> str:
    """Returns which non-finite values POPXL_CHECK stops at: "nan", "inf" (both) or "".

    Raises:
        ValueError: the variable has another value.
    """
    setting = os.environ[CHECK] if is_debug_flag_set(CHECK) else ""
    if setting not in ("", "nan", "inf"):
        raise ValueError(f"the environment variable {CHECK} is {setting!r}, but must be nan or inf")
    return setting
