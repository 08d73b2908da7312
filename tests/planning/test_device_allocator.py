"""Where arrays are in a device's memory: no two overlap, and gaps are what XLA's rule leaves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from popxl.plan.device_allocator import DeviceAllocator

MB = 2**20


def test_the_smallest_piece_that_is_large_enough_is_taken() -> None:
    allocator = DeviceAllocator()
    first, _, second, _ = (allocator.allocate(n * MB) for n in (300, 1, 200, 1))
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(180 * MB) == second
    assert allocator.allocate(180 * MB) == first
    assert allocator.extent == 502 * MB


def test_a_rest_lies_idle_unless_it_is_large_or_at_least_half() -> None:
    """Of 100 MiB 60 leave a rest that nothing else takes, 50 do not; of 600 MiB 400 do not."""
    for size, taken, rest, is_idle in (
        (100, 60, 40, True),
        (100, 50, 50, False),
        (600, 400, 200, False),
    ):
        allocator = DeviceAllocator()
        at, _ = allocator.allocate(size * MB), allocator.allocate(MB)
        allocator.free(at)
        assert allocator.allocate(taken * MB) == at
        assert (allocator.allocate(rest * MB) > at + size * MB) == is_idle


def test_what_is_free_in_all_can_be_too_little_in_one_piece() -> None:
    """As where a device lacked 3.04 GiB for what an update took in one piece, and had 6.3 GB."""
    allocator = DeviceAllocator()
    pieces = [allocator.allocate(200 * MB) for _ in range(20)]
    for at in pieces[::2]:
        allocator.free(at)
    allocator.allocate(900 * MB)
    assert allocator.extent == 20 * 200 * MB + 900 * MB


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 300 * MB), st.integers(0, 2**16)), min_size=1, max_size=60)
)
def test_pieces_do_not_overlap_and_are_whole_again_once_free(steps) -> None:
    """Arrays come and go in any order; after all have gone, the memory is as new."""
    allocator, live = DeviceAllocator(), dict[int, int]()
    for size, choice in steps:
        if choice % 3 == 0 and live:
            at = sorted(live)[choice % len(live)]
            del live[at]
            allocator.free(at)
        else:
            at = allocator.allocate(size)
            assert all(at + size <= other or other + live[other] <= at for other in live)
            live[at] = size
        assert allocator.extent >= sum(live.values())
    extent = allocator.extent
    for at in live:
        allocator.free(at)
    assert allocator.allocate(extent) == 0
    assert allocator.extent == max(extent, 256)
