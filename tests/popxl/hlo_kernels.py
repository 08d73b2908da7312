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
    fused = _computations(hlo)
    total = 0
    for name, type_, op, rest in filter(None, map(_parsed, entry)):
        sizes[name] = _size(type_)
        if op not in _NO_KERNELS:
            operands = list(dict.fromkeys(re.findall(r"%([\w.-]+)", rest.partition(")")[0])))
            called = re.search(r"calls=%([\w.-]+)", rest)
            slices = _sliced(fused[called[1]]) if called else {}
            total += sizes[name] + sum(
                min(sizes.get(operand, 0), slices.get(number, math.inf))
                for number, operand in enumerate(operands)
            )
    return int(total)


def _computations(hlo: str) -> dict[str, list[tuple[str, ...]]]:
    """Instructions of each computation, by its name."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for block in re.split(r"\n(?=%|ENTRY)", hlo):
        name, _, body = block.partition(" ")
        found[name.lstrip("%")] = [p for line in body.splitlines()[1:] if (p := _parsed(line))]
    return found


def _sliced(instructions: list[tuple[str, ...]]) -> dict[int, int]:
    """Bytes read of each parameter of which a fused computation takes slices alone."""
    names = {
        name: int(rest.partition(")")[0]) for name, _, op, rest in instructions if op == "parameter"
    }
    others: set[int] = set()
    found: dict[int, int] = {}
    for name, type_, op, rest in instructions:
        read = {names[n] for n in re.findall(r"%([\w.-]+)", rest.partition(")")[0]) if n in names}
        if op == "bitcast":
            for number in read:
                names[name] = number
        elif op == "slice":
            found.update({n: found.get(n, 0) + _size(type_) for n in read})
        else:
            others |= read
    return {n: count for n, count in found.items() if n not in others}


def _parsed(line: str) -> tuple[str, ...] | None:
    found = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
    return None if found is None else found.groups()


def _size(type_: str) -> int:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", type_.replace(_WORKSPACE, ""))
    return sum(
        _MAX_LOADED_BYTES.get(kind, 0) * math.prod(int(n) for n in shape.split(",") if n)
        for kind, shape in shapes
    )
