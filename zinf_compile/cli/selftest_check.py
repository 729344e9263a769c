"""What a check of the GPU self-test returns or raises."""

from __future__ import annotations

from typing import NamedTuple

from zinf_compile.errors import ZinfError


class SelfTestError(ZinfError):
    """The self-test can't run."""


class NotHere(Exception):
    """A check that this device, or what the command was given, has no place for."""


class Finding(NamedTuple):
    """The result of a check."""

    passed: bool
    text: str
    """Numbers, and what they were compared with."""
