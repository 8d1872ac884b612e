"""What can go wrong, one class a kind: each is a HyperMpmdError and also the built-in error people expect to catch."""

from __future__ import annotations


class HyperMpmdError(Exception):
    """The base of every error that hyper_mpmd raises on purpose."""
