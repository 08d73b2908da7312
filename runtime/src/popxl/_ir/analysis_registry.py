"""Registry through which IR classes call analyses without importing them.

Analyses are a layer above the IR: each is looked up when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FUNCTIONS = {
    "popxl._ir.create_graph": ("build_graph",),
    "popxl._analysis.dot_export": ("write_dot_checkpoint",),
    "popxl._analysis.effects": ("program_effects",),
    "popxl._analysis.functionalization": ("functionalize",),
    "popxl._analysis.printing": (
        *("format_op", "format_graph", "format_ir", "format_node", "format_functional_graph"),
    ),
    "popxl._analysis.reference_overlap": ("modified_call_inputs",),
}
_HOMES = {name: module for module, names in _FUNCTIONS.items() for name in names}


class _Analyses:
    """The analyses, as functions."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"no analysis {name!r}")
        return getattr(import_module(_HOMES[name]), name)


analyses = _Analyses()
