"""Shards of tensors by their logical names: each process saves and reads only its own shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Axes, offsets and sizes of a box, as in `TensorShard`."""


@dataclass(frozen=True)
class TensorShard:
    """Consecutive elements of a box (axis-aligned block) of a tensor.

    Attributes:
        shape: shape of the full tensor.
        axes: order of the tensor's axes in the box.
        offsets, sizes: start and size of the box along each of `axes`.
        start, length: range of elements within the box, in C order.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    length: int

    @property
    def box(self) -> Box:
        return self.axes, self.offsets, self.sizes

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> TensorShard:
        """Return the shard that contains all elements of a tensor."""
        axes = tuple(range(len(shape)))
        return cls(shape, axes, (0,) * len(shape), shape, 0, math.prod(shape))


ShardLayout = tuple[TensorShard, ...]
"""All shards of a tensor, ordered by box. Tensors with the same sharding share one object."""


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor whose shards are held by several processes.

    Attributes:
        processes: the processes that hold each shard; tensors with the same sharding share one
            object.
        read: returns the elements of a shard by its index, (length,), on a process that holds it.
    """

    name: str
    dtype: np.dtype
    layout: ShardLayout
    processes: tuple[tuple[int, ...], ...]
    read: Callable[[int], np.ndarray]


@runtime_checkable
class ShardSource(Protocol):
    """Mapping of tensors by name that can be read shard by shard."""

    def sharded_tensors(self) -> Iterable[ShardedTensor]:
        """Return all sharded tensors by name, in the same order on all processes."""


def assemble_tensor(
    shape: tuple[int, ...], dtype: np.dtype, shards: Mapping[TensorShard, Callable[[], np.ndarray]]
) -> np.ndarray:
    """Assemble a full array from shards; elements outside of them are 0.

    Args:
        shards: function that returns the elements of each shard, (length,).
    """
    full = np.zeros(shape, dtype)
    for box, in_box in _group_by_box(shards).items():
        view = _box_view(full, box)
        if in_box[0].length == view.size:
            values = shards[in_box[0]]()
        else:
            values = np.zeros(view.size, dtype)
            for shard in in_box:
                values[shard.start : shard.start + shard.length] = shards[shard]()
        view[...] = values.reshape(view.shape)
    return full


def iter_with_offsets(shards: Iterable[TensorShard]) -> Iterator[tuple[int, TensorShard]]:
    """Yield shards stored one after the other, each with its element offset in the array."""
    offset = 0
    for shard in shards:
        yield offset, shard
        offset += shard.length


def check_shards_cover_tensor(shards: Collection[TensorShard]) -> None:
    """Check that shards cover each element of a tensor exactly once.

    Raises:
        ValueError: they do not.
    """
    shape = next(iter(shards)).shape
    boxes = _group_by_box(shards)
    for (axes, offsets, sizes), in_box in boxes.items():
        if any(shard.start != start for start, shard in iter_with_offsets(in_box)):
            raise ValueError("its shards do not follow each other")
        if sum(shard.length for shard in in_box) != math.prod(sizes):
            raise ValueError("shards are missing")
        ends = (o + n for _, o, n in sorted(zip(axes, offsets, sizes, strict=True)))
        if any(end > limit for end, limit in zip(ends, shape, strict=True)):
            raise ValueError("a shard is outside of it")
    if any(shard.shape != shape for shard in shards):
        raise ValueError("its shards are of several tensors")
    if sum(math.prod(sizes) for _, _, sizes in boxes) != math.prod(shape):
        raise ValueError("shards are missing")
    if any(_boxes_overlap(one, other) for one, other in combinations(boxes, 2)):
        raise ValueError("its shards overlap")


class StoredShards(NamedTuple):
    """Shards of a tensor that are stored in one array, one after the other.

    Attributes:
        chunk_elements: number of elements of a digest chunk of the array.
        shards: pairs of offset in the array and shard.
    """

    chunk_elements: int
    shards: tuple[tuple[int, TensorShard], ...]


@lru_cache(maxsize=1024)  # identical layers need the same chunks
def find_needed_chunks(
    required: tuple[TensorShard, ...], stored: tuple[StoredShards, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return, for each stored array, the chunk numbers that contain elements of `required`."""
    (shape,) = {shard.shape for one in stored for _, shard in one.shards}
    is_required = shard_mask(shape, required)
    box_masks: dict[Box, np.ndarray] = {}
    needed = []
    for chunk_elements, shards in stored:
        chunks: set[int] = set()
        for offset, shard in shards:
            if shard.box not in box_masks:
                box_masks[shard.box] = _box_view(is_required, shard.box).reshape(-1)
            mask = box_masks[shard.box][shard.start : shard.start + shard.length]
            chunks.update(_chunks_with_any(mask, offset, chunk_elements))
        needed.append(tuple(sorted(chunks)))
    return tuple(needed)


def shard_mask(shape: tuple[int, ...], shards: Iterable[TensorShard]) -> np.ndarray:
    """Return a bool array of a tensor's `shape` that is True for the elements of the shards."""
    mask = np.zeros(shape, np.bool_)
    for box, in_box in _group_by_box(shards).items():
        view = _box_view(mask, box)
        box_mask = np.zeros(view.size, np.bool_)
        for shard in in_box:
            box_mask[shard.start : shard.start + shard.length] = True
        view |= box_mask.reshape(view.shape)
    return mask


def _chunks_with_any(mask: np.ndarray, offset: int, chunk_elements: int) -> Iterable[int]:
    """Return the numbers of an array's chunks that contain a True of `mask`, placed at `offset`."""
    if not mask.any():
        return ()
    first, last = offset // chunk_elements, (offset + mask.size - 1) // chunk_elements
    borders = [max(chunk * chunk_elements - offset, 0) for chunk in range(first, last + 1)]
    return (first + np.flatnonzero(np.logical_or.reduceat(mask, borders))).tolist()


def _box_view(tensor: np.ndarray, box: Box) -> np.ndarray:
    """Return a view of one box (axis-aligned block) of a tensor, with axes in the box's order."""
    axes, offsets, sizes = box
    slices: tuple[Any, ...] = (*(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)), ...)
    return tensor.transpose(axes)[slices]


def _group_by_box(shards: Iterable[TensorShard]) -> dict[Box, list[TensorShard]]:
    """Group shards by box (axis-aligned block) of the tensor, each ordered by first element."""
    ordered = sorted(shards, key=lambda shard: (shard.box, shard.start))
    return {box: list(in_box) for box, in_box in groupby(ordered, key=lambda shard: shard.box)}


def _boxes_overlap(one: Box, other: Box) -> bool:
    ranges, other_ranges = (sorted(zip(*box, strict=True)) for box in (one, other))
    return all(
        a < b + length_b and b < a + length_a
        for (_, a, length_a), (_, b, length_b) in zip(ranges, other_ranges, strict=True)
    )
