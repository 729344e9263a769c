"""Dropout in compiled regions: the same numbers for one seed wherever it runs, and the right ones on average."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from paths import SUPPORT
from rank_random import digest_of_training, digest_on_a_rank
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from training import assert_same, twins, whole_gradient

pytestmark = pytest.mark.slow


def test_one_seed_gives_one_result() -> None:
    first = digest_of_training(seed=1)
    torch.compiler.reset()
    assert digest_of_training(seed=1) == first
    assert digest_of_training(seed=2) != first


@pytest.mark.parametrize("bucket", ["8KiB", "1GiB"])
def test_buckets_that_cut_no_block_give_one_result(bucket: str) -> None:
    """Blocks end regions whatever the bucket: only what is transferred together differs."""
    assert digest_of_training(seed=1, bucket=bucket) == digest_of_training(seed=1, bucket="32MiB")


@pytest.mark.thorough
def test_restarts_give_one_result_with_a_cold_and_a_warm_cache(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": f"{SUPPORT}{os.pathsep}{Path(__file__).parent}",
    }
    digests, libraries = [], []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-m", "rank_random"], env=environment, check=True, capture_output=True, text=True)
        digests.append(run.stdout.strip())
        libraries.append(sorted(path.name for path in tmp_path.rglob("*.so")))
    assert libraries[0]
    assert libraries[0] == libraries[1], "the second run compiled something"
    assert digests == [digest_of_training(seed=1)] * 2


@pytest.mark.distributed
def test_two_ranks_with_the_same_batches_give_the_result_of_one() -> None:
    """The mean of two equal gradients is each of them."""
    assert run_ranks(digest_on_a_rank, 2) == [digest_of_training(seed=1)] * 2


class Masks(nn.Module):
    """Two layers that scale by one, each followed by dropout; returns both results."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.ones(500), torch.ones(500)])
        self.p = p

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.dropout(x * scale, self.p, self.training) for scale in self.layers)


def compiled_masks(p: float) -> tuple[Masks, Any]:
    model = Masks(p)
    return model, torch.compile(model, backend="zero_infinity", options={"compute": "inductor", "bucket": 1})


@pytest.mark.parametrize("p", [0.1, 0.5, more(0.9)])
def test_as_many_are_dropped_as_asked_and_the_rest_scaled(p: float) -> None:
    _, call = compiled_masks(p)
    x = torch.ones(200, 500, requires_grad=True)
    kept = []
    for _ in range(2):
        results = call(x)
        for result in results:
            kept.append(result.detach() != 0)
            torch.testing.assert_close(result.detach(), kept[-1] / (1 - p))
        x.grad = None
        sum(result.sum() for result in results).backward()
        torch.testing.assert_close(x.grad, sum(result.detach() for result in results), msg="the backward has other masks")
    five_sigma = 5 * (p * (1 - p) / x.numel()) ** 0.5
    for mask in kept:
        assert abs(1 - mask.double().mean() - p) < five_sigma
        for along in (0, 1):
            assert (mask.double().mean(along).sub(1 - p).abs() < 6 * (p * (1 - p) / mask.shape[along]) ** 0.5).all()
    same = p * p + (1 - p) * (1 - p)
    for number, mask in enumerate(kept):
        for other in kept[:number]:
            agreement = (mask == other).double().mean()
            assert abs(agreement - same) < 5 * (same * (1 - same) / x.numel()) ** 0.5, "two masks have to do with each other"


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_and_everything_dropped(p: float, factor: float) -> None:
    _, call = compiled_masks(p)
    for result in call(torch.ones(3, 500)):
        assert torch.equal(result, torch.full((3, 500), factor))


def test_nothing_is_dropped_in_evaluation() -> None:
    model, call = compiled_masks(0.5)
    model.eval()
    state = torch.get_rng_state()
    for result in call(torch.ones(3, 500)):
        assert torch.equal(result, torch.ones(3, 500))
    assert torch.equal(torch.get_rng_state(), state)


class Looked(nn.Module):
    """Rows of an embedding, each looked up thousands of times, of which one is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 64, padding_idx=2)

    def forward(self, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.rows(numbers) * weights).sum()


def test_an_embeddings_gradient_is_summed_in_one_order_on_two_threads() -> None:
    """Inductor's own sum differs between any two runs of this, and from eager's."""
    batch = torch.randint(7, (64, 512)), torch.randn(64, 512, 64)
    eager, ours = twins(Looked)
    torch.set_num_threads(2)
    try:
        eager(*batch).backward()
        compiled = torch.compile(ours, backend="zero_infinity")
        for _ in range(5):
            ours.zero_grad()
            compiled(*batch).backward()
            assert_same("the gradient", eager.rows.weight.grad, whole_gradient(ours.rows.weight))  # type: ignore[union-attr,arg-type]
    finally:
        torch.set_num_threads(1)
