"""A heap of one rank in the test's own process, and the certainty that it leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
from shmem_ranks import own_resources

from hyper_mpmd import shmem
from hyper_mpmd.shmem.lifecycle import registry


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPER_PARALLEL_SHMEM_TIMEOUT_SEC", "20")
    yield
    for heap in list(registry.heaps.values()):
        heap.close_here()
    registry.heaps.clear()
    registry.unavailable = registry.last_failure = None


@pytest.fixture
def heap(monkeypatch):
    """An open heap of one rank and 1 MiB."""
    gc.collect()
    before = own_resources()
    monkeypatch.setenv("HYPER_PARALLEL_SHMEM_HEAP_SIZE", str(1 << 20))
    opened = shmem.acquire()
    yield opened
    if not opened.native.closed:
        opened.close_here()
        registry.heaps.clear()
    gc.collect()
    after = own_resources()
    assert after[1] <= before[1]
    assert after[0] <= before[0]
