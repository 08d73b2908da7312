"""Model of XLA's device allocator, to predict memory lost to fragmentation.

An array takes the smallest free block that is large enough (`tsl::BFCAllocator` in openxla/xla),
which is split only if much of it would remain. Adjacent free blocks are merged. So an array may not
fit although more bytes are free in total.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_UNIT = 256  # bytes: sizes are multiples of it
_LEFT_OVER = 128 * 2**20  # bytes of a block that may be wasted


class DeviceAllocator:
    """Simulated memory of a device with XLA's allocation policy.

    Attributes:
        extent: largest end address of an allocation, in bytes.
    """

    def __init__(self) -> None:
        self.extent = 0
        self._top = 0  # nothing is taken from here on
        self._allocated: dict[int, int] = {}  # bytes of pieces, by address
        self._by_size: list[tuple[int, int]] = []  # free pieces: bytes and address, in order
        self._free: dict[int, int] = {}  # bytes of free pieces, by address
        self._ends: dict[int, int] = {}  # their addresses, by their end

    def allocate(self, nbytes: int) -> int:
        """Allocates memory for an array; returns its address."""
        size = (-(-nbytes // _UNIT) or 1) * _UNIT
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            address, block = self._top, size
            self._top += size
            if self._top > self.extent:
                self.extent = self._top
        else:
            block, address = self._by_size[index]
            self._remove_free_block(address)
            if block >= 2 * size or block - size >= _LEFT_OVER:
                self._add_free_block(address + size, block - size)
                block = size
        self._allocated[address] = block
        return address

    def free(self, address: int) -> None:
        """Frees the simulated memory of the array at an address."""
        size = self._allocated.pop(address)
        if address + size in self._free:
            size += self._remove_free_block(address + size)
        if address in self._ends:
            before = self._ends[address]
            size += self._remove_free_block(before)
            address = before
        if address + size == self._top:
            self._top = address
        else:
            self._add_free_block(address, size)

    def _add_free_block(self, address: int, nbytes: int) -> None:
        self._free[address], self._ends[address + nbytes] = nbytes, address
        insort(self._by_size, (nbytes, address))

    def _remove_free_block(self, address: int) -> int:
        """Removes a block from the free list; returns its bytes."""
        size = self._free.pop(address)
        del self._ends[address + size]
        del self._by_size[bisect_left(self._by_size, (size, address))]
        return size
