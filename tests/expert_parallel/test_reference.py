"""The comparison that every other test here relies on, refusing what could pass for agreement."""

import pytest
import torch

from .reference import relative_error


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("swap", [False, True])
def test_values_that_are_not_finite_are_no_agreement(bad, swap):
    pair = [torch.tensor([1.0, bad]), torch.tensor([1.0, 2.0])]
    with pytest.raises(AssertionError):
        relative_error(*reversed(pair) if swap else pair)


def test_zeros_are_nothing_to_compare_with():
    with pytest.raises(AssertionError, match="nothing to compare with"):
        relative_error(torch.zeros(3), torch.zeros(3))
