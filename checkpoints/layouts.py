"""How tensors are cut into parts, as a manifest has it.

Tensors that are cut alike, such as those of a model's layers, have one layout in common: the size
of a manifest grows with the tensors, and not with the tensors times the replicas.
"""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import Any

from checkpoints.parts import Layout, Part, check_whole, with_starts
from files.errors import FileError
from files.json_files import Fields
from files.shown import shown


def layout_data(layout: Layout) -> dict[str, Any]:
    """A layout as data for JSON."""
    boxes = []
    for (axes, corner, box), inside in groupby(layout, lambda p: (p.axes, p.corner, p.box)):
        parts = list(inside)
        assert all(part.start == start for start, part in with_starts(parts))
        boxes.append({"axes": axes, "corner": corner, "box": box, "sizes": [p.size for p in parts]})
    return {"shape": list(layout[0].shape), "boxes": boxes}


def read_layout(fields: Fields) -> Layout:
    """The layout in a manifest.

    Raises:
        FileError: it is none, or not of whole tensors.
    """
    shape = tuple(fields.counts("shape"))
    layout = tuple(part for box in fields.rows("boxes") for part in _read_box(box, shape))
    if not layout:
        raise FileError("a tensor has no parts")
    try:
        check_whole(layout)
    except ValueError as error:
        raise FileError(f"a tensor of shape {shape} cannot be put together: {error}") from error
    return layout


def _read_box(fields: Fields, shape: tuple[int, ...]) -> list[Part]:
    axes, corner, box = (tuple(fields.counts(what)) for what in ("axes", "corner", "box"))
    if sorted(axes) != list(range(len(shape))) or not len(corner) == len(box) == len(shape):
        raise FileError(f"{shown(box)} is no box of a tensor of shape {shape}")
    sizes = fields.counts("sizes")
    starts = accumulate(sizes, initial=0)
    return [
        Part(shape, axes, corner, box, start, size)
        for start, size in zip(starts, sizes, strict=False)
    ]
