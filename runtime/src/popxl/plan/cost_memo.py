"""Memo of segment costs: segments equal to ones traced before in this process are not traced again.

The programs that a plan compares differ in few segments, and so do the layers of a program.
Segments that are equal, labels included, have equal costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popxl._compile.cache_key import UncacheableError, jax_settings, segment_lines
from popxl._schedule.segment import program_context
from popxl.plan.segment_cost import SegmentCost, trace_cost

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.ir import Ir

_MAX_SEGMENTS = 4096  # the oldest segment is dropped
_memo: dict[bytes, SegmentCost] = {}


def costs_of_segments(ir: Ir, segments: Sequence[Segment]) -> dict[Segment, SegmentCost]:
    """Returns the costs of a program's segments, by segment."""
    return {segment: _memoized_cost(ir, segment) for segment in segments}


def _memoized_cost(ir: Ir, segment: Segment) -> SegmentCost:
    try:
        key = _memo_key(ir, segment)
    except UncacheableError:
        return trace_cost(segment)
    if key not in _memo:
        _memo[key] = trace_cost(segment)
        while len(_memo) > _MAX_SEGMENTS:
            del _memo[next(iter(_memo))]
    return _memo[key]


def _memo_key(ir: Ir, segment: Segment) -> bytes:
    context = program_context(segment)
    platform = context.target.partition(" ")[0]
    digest = hashlib.sha256(f"{context.target} {context.rounding}\n".encode())
    for line in (*jax_settings(), *segment_lines(ir, platform, segment, with_labels=True)):
        digest.update(line.encode() + b"\n")
    return digest.digest()
