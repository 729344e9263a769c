"""Norms of parts together: those of the whole."""

from __future__ import annotations

import math

import pytest
import torch

from zinf_compile.sharded.gradient_norms import combine_norms


@pytest.mark.parametrize("order", [math.inf, -math.inf, 0.0, 1.0, 2.0, 3.0, 0.5])
def test_norms_of_parts_make_those_of_the_whole(order: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (3, 1, 4)]
    parts[1][2] = 0.0
    norms = torch.stack([torch.linalg.vector_norm(part, order, dim=1) for part in parts])
    expected = torch.linalg.vector_norm(torch.cat(parts, dim=1), order, dim=1)
    torch.testing.assert_close(combine_norms(norms, order), expected, rtol=1e-12, atol=0)
