"""Nested states compared bit by bit, by path."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def assert_equal(found: Any, expected: Any) -> None:
    """Compare all leaves of two nested values."""
    ours, theirs = (dict(pytree.tree_flatten_with_path(value)[0]) for value in (found, expected))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        where = pytree.keystr(path)
        if isinstance(value, torch.Tensor):
            assert ours[path].dtype == value.dtype, where
            assert torch.equal(ours[path].detach(), value.detach()), where
        else:
            assert ours[path] == value, where
