"""Kernels in the text of a module that XLA has compiled."""

from __future__ import annotations

import math
import re

_MAX_LOADED_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_NO_KERNELS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_WORKSPACE = "s8[4194304]"  # of cublasLt's products


def traffic(hlo: str) -> int:
    """Bytes that kernels read and write: operands and results of the instructions of the entry
    computation."""
    entry = hlo[hlo.index("\nENTRY") :].splitlines()[2:]
    sizes: dict[str, int] = {}
    total = 0
    for name, type_, op, rest in filter(None, map(_parsed, entry)):
        sizes[name] = _size(type_)
        if op not in _NO_KERNELS:
            operands = set(re.findall(r"%([\w.-]+)", rest.partition(")")[0]))
            total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands)
    return total


def _parsed(line: str) -> tuple[str, ...] | None:
    found = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
    return None if found is None else found.groups()


def _size(type_: str) -> int:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", type_.replace(_WORKSPACE, ""))
    return sum(
        _MAX_LOADED_BYTES.get(kind, 0) * math.prod(int(n) for n in shape.split(",") if n)
        for kind, shape in shapes
    )
