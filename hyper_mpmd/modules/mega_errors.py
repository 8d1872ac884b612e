"""What MegaMoeExperts refuses. Over ranks all raise the same error, so each kind has a number that travels."""

from __future__ import annotations

from hyper_mpmd.errors import HyperMpmdError


class MegaMoeError(HyperMpmdError):
    """The base of what MegaMoeExperts raises."""


class MegaMoeValueError(MegaMoeError, ValueError):
    """A size, shape, value or device that cannot be."""


class MegaMoeTypeError(MegaMoeError, TypeError):
    """Something of the wrong type: a dtype, a class."""


class MegaMoeStateError(MegaMoeError, RuntimeError):
    """A call that comes too late or at the wrong moment: closed, in use by another thread, already used."""


class CapacityOverflowError(MegaMoeError, RuntimeError):
    """A rank would receive more rows than the layer's capacity."""


# What a rank's status in the exchange stands for; 0 is a rank that refuses nothing.
KINDS: tuple[type[MegaMoeError], ...] = (MegaMoeError, MegaMoeValueError, MegaMoeTypeError, MegaMoeStateError)
