"""The kernels are tested under every instruction set that this machine has."""

import pytest
from kernel_views import ISAS, K


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name, scope="module")
def isa(request):
    chosen = K.isa()
    assert K.select_isa(request.param)
    yield request.param
    assert K.select_isa(chosen)
