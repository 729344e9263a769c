"""Random numbers of the CPU drawn in ranges: those that PyTorch draws at once, bit by bit, and its state afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zinf_compile
from zinf_compile.init import parallel_random
from zinf_compile.init.mt19937 import Stream
from zinf_compile.init.parallel_random import ParallelDraws, plan_fill

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Draw = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(state)


def values(draw: Draw, *tensors: torch.Tensor, apart: bool, seed: int = 3, before: int = 7) -> list[torch.Tensor]:
    """Return what is drawn, one tensor after the other, and the state that is left."""
    torch.manual_seed(seed)
    torch.rand(before)
    torch.randn(3)  # an odd number of normal ones: the generator keeps the fourth
    made = [torch.zeros_like(tensor) for tensor in tensors]
    if apart:
        with ParallelDraws():
            for tensor in made:
                draw(tensor)
    else:
        for tensor in made:
            draw(tensor)
    return [*made, torch.get_rng_state(), torch.randn(5)]


def assert_the_same(draw: Draw, *tensors: torch.Tensor, **how: int) -> None:
    for ours, theirs in zip(values(draw, *tensors, apart=True, **how), values(draw, *tensors, apart=False, **how), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1 << 16, (2 << 16) + 5])
@pytest.mark.parametrize(
    "draw",
    [
        lambda t: t.uniform_(),
        lambda t: t.uniform_(-0.0180505, 0.0180505),
        lambda t: t.normal_(),
        lambda t: t.normal_(0.25, 0.02),
        lambda t: t.normal_(std=0.0),
        lambda t: nn.init.kaiming_uniform_(t.view(-1, 1), a=5**0.5),
        lambda t: nn.init.trunc_normal_(t, std=0.02),
    ],
)
def test_values_and_state_are_pytorchs(draw: Draw, numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_random, "_LEAST_NUMEL", 1 << 16)
    assert_the_same(draw, torch.empty(numel, dtype=dtype), torch.empty(20), torch.empty(numel, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1 << 20, (2 << 20) + 5])
def test_values_and_state_are_pytorchs_at_the_size_that_is_drawn_in_ranges(numel: int, dtype: torch.dtype) -> None:
    draw: Draw = nn.init.normal_ if numel == 1 << 20 else nn.init.uniform_
    assert_the_same(draw, torch.empty(numel, dtype=dtype), torch.empty(20), torch.empty(numel, dtype=dtype))


@settings(max_examples=60)
@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=4), before=st.integers(0, 1500), seed=st.integers(0, 99),
    threads=st.integers(1, 4), dtype=st.sampled_from(DTYPES), normal=st.booleans(),
)  # fmt: skip
def test_any_size_from_any_state(numels: list[int], before: int, seed: int, threads: int, dtype: Any, normal: bool) -> None:
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_random, "_LEAST_NUMEL", 100)
        tensors = [torch.empty(numel, dtype=dtype) for numel in numels]
        assert_the_same(lambda t: t.normal_() if normal else t.uniform_(), *tensors, seed=seed, before=before)


@settings(max_examples=60)
@given(
    data=st.data(), numel=st.integers(100, 3000), before=st.integers(0, 1500), dtype=st.sampled_from(DTYPES), normal=st.booleans()
)
def test_any_ranges_are_those_of_the_whole(data: Any, numel: int, before: int, dtype: Any, normal: bool) -> None:
    """Whatever their borders, and in whatever order they are drawn."""
    op = parallel_random._NORMAL if normal else parallel_random._UNIFORM
    torch.rand(before)
    random = torch.get_rng_state()
    whole = op(torch.empty(numel, dtype=dtype), 0.25, 0.75)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_random, "_LEAST_NUMEL", 100)
        fill = plan_fill(op, numel, dtype, (0.25, 0.75))
    assert fill is not None
    assert torch.equal(torch.get_rng_state(), after)
    borders = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=6))})
    ranges = [*zip(fill.parts(borders[:-1]), itertools.pairwise(borders), strict=True)]
    for make, (start, end) in data.draw(st.permutations(ranges)):
        drawn = torch.full((end - start,), 7, dtype=dtype)
        make(drawn)
        assert torch.equal(drawn, whole[start:end])
    assert torch.equal(torch.get_rng_state(), after)


def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of each draw whether it could be done in ranges."""
    said: list[bool] = []

    def ask(*arguments: Any) -> Any:
        fill = plan_fill(*arguments)
        said.append(fill is not None)
        return fill

    monkeypatch.setattr(parallel_random, "plan_fill", ask)
    return said


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_tensors_are_drawn_in_ranges(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ranges, tensor = planned(monkeypatch), torch.empty(2 << 20, dtype=dtype)
    with ParallelDraws():
        nn.init.normal_(nn.init.uniform_(tensor))
    assert in_ranges == [True, True]


@pytest.mark.parametrize(("name", "value"), [("_WORDS", {torch.float32: 2}), ("_GROUP", 8)])
def test_where_ranges_would_have_other_numbers_pytorch_draws(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ranges = planned(monkeypatch)
    monkeypatch.setattr(parallel_random, name, value)
    parallel_random._parts_agree.cache_clear()
    try:
        assert not parallel_random.parts_agree(torch.float32)
        assert_the_same(lambda t: t.normal_(), torch.empty(3 << 20))
    finally:
        parallel_random._parts_agree.cache_clear()
    assert in_ranges == [False]


@pytest.mark.parametrize(
    "draw",
    [
        lambda t: t.t().normal_(),
        lambda t: t[:, 1:].uniform_(),
        lambda t: t.normal_(generator=torch.Generator().manual_seed(1)),
        lambda t: t.normal_(float("inf"), 1.0),
        lambda t: t.exponential_(),
        lambda t: t.random_(0, 9),
        lambda t: t.bernoulli_(0.5),
    ],
)
def test_other_draws_are_pytorchs(draw: Draw) -> None:
    assert_the_same(draw, torch.empty(1500, 1501))


def test_errors_are_pytorchs_and_leave_its_state() -> None:
    tensor, state = torch.empty(3 << 20, dtype=torch.float16), torch.get_rng_state()
    with ParallelDraws():
        for dtype in DTYPES:
            with pytest.raises(RuntimeError, match="std"):
                tensor.to(dtype).normal_(0.0, -1.0)
            with pytest.raises(RuntimeError, match="uniform_ expects"):
                tensor.to(dtype).uniform_(1.0, 0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_and_inference_mode_do_not_mind() -> None:
    with ParallelDraws():
        for dtype in (torch.bfloat16, torch.float16):
            parameter = nn.Parameter(torch.zeros(2 << 20, dtype=dtype))
            with torch.no_grad():
                parameter.normal_()
            assert parameter.requires_grad
            assert parameter.any()
            with torch.inference_mode():
                assert torch.zeros(2 << 20, dtype=dtype).uniform_().any()


def test_a_stream_goes_on_where_a_generator_was() -> None:
    for drawn in (0, 1, 623, 624, 625, 5000):
        generator = torch.Generator().manual_seed(drawn)
        torch.empty(drawn).uniform_(generator=generator)
        stream = Stream(generator.get_state())
        assert torch.equal(stream.ahead(700).state(), stream.ahead(300).ahead(400).state())
        other = torch.Generator()
        other.set_state(stream.ahead(1000).state())
        expected = torch.empty(1100).uniform_(generator=generator)[1000:]
        assert torch.equal(torch.empty(100).uniform_(generator=other), expected)


def test_a_state_of_another_form_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"has 5056 bytes, not \[16\]"):
        Stream(torch.zeros(16, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_model_made_on_meta_has_the_numbers_of_one_built_whole(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(1100, 1001), nn.Linear(1001, 1100), nn.LayerNorm(1100), nn.Linear(1100, 2001)).to(dtype)

    torch.manual_seed(5)
    with torch.device("meta"):
        ours = build()
    zinf_compile.partition(ours)
    left = torch.get_rng_state()
    torch.manual_seed(5)
    whole = build()
    if dtype == torch.bfloat16:  # drawn in it, not rounded to it
        torch.manual_seed(5)
        for module in whole:
            module.reset_parameters()  # type: ignore[operator, union-attr]
    assert torch.equal(torch.get_rng_state(), left)
    for name, value in zinf_compile.full_state_dict(ours).items():
        assert torch.equal(value, whole.state_dict()[name]), name
