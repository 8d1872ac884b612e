"""What tests of many-process work need: ranks that start once, run job after job, and never hang the test that waits.

Shipped with the package, so that code built on hyper_mpmd can be tested the same way. Needs torch.
"""

from hyper_mpmd.testing.ranks import RankDied, RankError, RankFailed, RankPool, RankPools, RanksTimedOut

__all__ = ["RankPool", "RankPools", "RankError", "RankFailed", "RankDied", "RanksTimedOut"]
