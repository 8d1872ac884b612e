"""Fixtures of the whole suite."""

import pytest


@pytest.fixture(scope="session")
def rank_pools():
    """Pools of ranks by world size, each started at its first job and kept to the end: `rank_pools[4].run(job)`."""
    from hyper_mpmd.testing import RankPools  # here, because most tests need no torch

    with RankPools() as pools:
        yield pools
