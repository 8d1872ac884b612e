"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def rank_pools() -> Iterator["RankPools"]:  # noqa: F821  # named in quotes: most tests need no torch
    from hyper_mpmd.testing import RankPools

    with RankPools() as pools:
        yield pools
