"""MLPs a slice of tokens at a time on one of several ranks, near the mean of eager's gradients over the ranks."""

from __future__ import annotations

import torch
from compute_models import Gpt
from rank_chunk_loss import train_near_mean


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of three slices on one rank, and of a part of one on the other."""
    shape = (3, 48) if (step + rank) % 2 == 0 else (2, 7)
    numbers = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(300, shape, generator=numbers), torch.randint(300, shape, generator=numbers)


def compare_on_a_rank(rank: int, size: int, compute: str) -> str:
    """Train two steps on other numbers of tokens on each rank; return "" where loss and gradients are near eager's."""
    torch.manual_seed(7)
    options = {"compute": compute, "compute_shape": {"token_tile": 4 * 256 * 64}, "timeout_s": 100}
    return train_near_mean(rank, size, Gpt(), batch, options)
