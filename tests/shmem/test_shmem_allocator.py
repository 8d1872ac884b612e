"""The native allocator of symmetric offsets against a simple twin, and what any allocator has to keep."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_mpmd import _native

GRANULE = 64


class Twin:
    """First fit, found by trying every granule."""

    def __init__(self, capacity: int) -> None:
        self.cells = [False] * (capacity // GRANULE)
        self.live: dict[int, int] = {}

    def allocate(self, nbytes: int, alignment: int) -> int | None:
        count = max(1, -(-nbytes // GRANULE))
        for at in range(len(self.cells) - count + 1):
            if at * GRANULE % alignment == 0 and not any(self.cells[at : at + count]):
                self.cells[at : at + count] = [True] * count
                self.live[at * GRANULE] = count
                return at * GRANULE
        return None

    def free(self, offset: int) -> bool:
        count = self.live.pop(offset, 0)
        self.cells[offset // GRANULE : offset // GRANULE + count] = [False] * count
        return count > 0


steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 1200), st.sampled_from([1, 64, 128, 256, 1024])),
        st.tuples(st.just("free"), st.integers(0, 40), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(0, 4096), steps=steps)
def test_any_sequence_gives_the_offsets_of_the_twin(capacity, steps):
    native, twin = _native.ShmemAllocator(capacity), Twin(capacity)
    peak = 0
    for kind, number, alignment in steps:
        if kind == "allocate":
            needed = native.capacity_needed(number, alignment)
            got = native.allocate(number, alignment)
            assert got == twin.allocate(number, alignment)
            if got is None:
                assert needed > capacity // GRANULE * GRANULE
        else:
            offsets = sorted(twin.live)
            offset = offsets[number % len(offsets)] if offsets and number < 35 else number * 32 + 7
            assert native.free(offset) == twin.free(offset)
        used = sum(twin.cells) * GRANULE
        peak = max(peak, used)
        assert (native.used, native.peak, native.live) == (used, peak, len(twin.live))
        assert native.largest_free == _longest_gap(twin.cells) * GRANULE


def _longest_gap(cells: list[bool]) -> int:
    longest = run = 0
    for taken in cells:
        run = 0 if taken else run + 1
        longest = max(longest, run)
    return longest


@settings(max_examples=100, deadline=None)
@given(steps=steps, nbytes=st.integers(0, 5000), alignment=st.sampled_from([1, 64, 4096]))
def test_the_capacity_it_says_is_needed_would_have_been_enough(steps, nbytes, alignment):
    def after(capacity: int) -> _native.ShmemAllocator:
        allocator = _native.ShmemAllocator(capacity)
        offsets = []
        for kind, number, align in steps:
            if kind == "allocate":
                offsets.append(allocator.allocate(number, align))
            elif offsets:
                allocator.free(offsets.pop(number % len(offsets)))
        return allocator

    # In a heap where everything before had room, so that the larger heap has the same layout.
    roomy = after(1 << 20)
    needed = roomy.capacity_needed(nbytes, alignment)
    if needed <= 1 << 20:
        exact = after(max(needed, 1200 * 60))
        assert exact.allocate(nbytes, alignment) is not None
