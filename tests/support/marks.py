"""Marks that many tests use."""

from __future__ import annotations

from typing import Any

import pytest


def more(*values: Any) -> Any:
    """Return a case that `make thorough` adds: others show the same of the product."""
    return pytest.param(*values, marks=pytest.mark.thorough)
