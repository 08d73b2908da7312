"""Work of segments that were traced before in this process.

Programs that a plan chooses among differ in few segments, and layers of one program are alike in
many. Equal segments, labels of their parts included, do the same work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popxl._compile.cache_key import Uncacheable, jax_settings, segment_lines
from popxl._schedule.segment import program_context
from popxl.plan.segment_cost import SegmentCost, trace_cost

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.ir import Ir

_MAX_SEGMENTS = 4096  # segments that are known, the oldest of which goes
_memo: dict[bytes, SegmentCost] = {}


def costs_of_segments(ir: Ir, segments: Sequence[Segment]) -> dict[Segment, SegmentCost]:
    """What the segments of a program do."""
    return {segment: _cost(ir, segment) for segment in segments}


def _cost(ir: Ir, segment: Segment) -> SegmentCost:
    try:
        key = _key(ir, segment)
    except Uncacheable:
        return trace_cost(segment)
    if key not in _memo:
        _memo[key] = trace_cost(segment)
        while len(_memo) > _MAX_SEGMENTS:
            del _memo[next(iter(_memo))]
    return _memo[key]


def _key(ir: Ir, segment: Segment) -> bytes:
    context = program_context(segment)
    platform = context.target.partition(" ")[0]
    digest = hashlib.sha256(f"{context.target} {context.rounding}\n".encode())
    for line in (*jax_settings(), *segment_lines(ir, platform, segment, with_labels=True)):
        digest.update(line.encode() + b"\n")
    return digest.digest()
