"""Work of segments that were traced before in this process.

Programs that a plan chooses among differ in few segments, and layers of one program are alike in
many. Equal segments, labels of their parts included, do the same work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popxl._compile.cache_key import Uncacheable, jax_settings, segment_lines
from popxl._schedule.segment import facts_of
from popxl.plan.segment_cost import SegmentWork, work_of

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.ir import Ir

_MOST = 4096  # segments that are known, the oldest of which goes
_known: dict[bytes, SegmentWork] = {}


def works_of(ir: Ir, segments: Sequence[Segment]) -> dict[Segment, SegmentWork]:
    """What the segments of a program do."""
    return {segment: _work(ir, segment) for segment in segments}


def _work(ir: Ir, segment: Segment) -> SegmentWork:
    try:
        key = _key(ir, segment)
    except Uncacheable:
        return work_of(segment)
    if key not in _known:
        _known[key] = work_of(segment)
        while len(_known) > _MOST:
            del _known[next(iter(_known))]
    return _known[key]


def _key(ir: Ir, segment: Segment) -> bytes:
    facts = facts_of(segment)
    platform = facts.target.partition(" ")[0]
    digest = hashlib.sha256(f"{facts.target} {facts.rounding}\n".encode())
    for line in (*jax_settings(), *segment_lines(ir, platform, segment, labelled=True)):
        digest.update(line.encode() + b"\n")
    return digest.digest()
