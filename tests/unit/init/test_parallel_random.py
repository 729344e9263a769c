"""Random numbers of the CPU drawn sooner: PyTorch's own, bit by bit, and its state afterwards."""

from __future__ import annotations

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
from zinf_compile.init.parallel_random import SoonerDraws

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Draw = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(state)


def values(draw: Draw, *tensors: torch.Tensor, sooner: bool, seed: int = 3, before: int = 7) -> list[torch.Tensor]:
    """Return what is drawn, one tensor after the other, and the state that is left."""
    torch.manual_seed(seed)
    torch.rand(before)
    torch.randn(3)  # an odd number of normal ones: the generator keeps the fourth
    made = [torch.zeros_like(tensor) for tensor in tensors]
    if sooner:
        with SoonerDraws():
            for tensor in made:
                draw(tensor)
    else:
        for tensor in made:
            draw(tensor)
    return [*made, torch.get_rng_state(), torch.randn(5)]


def assert_the_same(draw: Draw, *tensors: torch.Tensor, **how: int) -> None:
    for ours, theirs in zip(values(draw, *tensors, sooner=True, **how), values(draw, *tensors, sooner=False, **how), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1 << 20, (2 << 20) + 5])
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
def test_values_and_state_are_pytorchs(draw: Draw, numel: int, dtype: torch.dtype) -> None:
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
        patch.setattr(parallel_random, "_COMPARED_FIRST", 32)
        tensors = [torch.empty(numel, dtype=dtype) for numel in numels]
        assert_the_same(lambda t: t.normal_() if normal else t.uniform_(), *tensors, seed=seed, before=before)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[bool]:
    """Note what a way of drawing says each time that it is asked."""
    said: list[bool] = []
    way = getattr(parallel_random, name)

    def ask(*arguments: Any) -> bool:
        said.append(way(*arguments))
        return said[-1]

    monkeypatch.setattr(parallel_random, name, ask)
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loops_are_what_draws(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    by_loops, tensor = counted(monkeypatch, "_draw_by_loops"), torch.empty(2 << 20, dtype=dtype)
    with SoonerDraws():
        nn.init.normal_(nn.init.uniform_(tensor))
    if not all(parallel_random._loops_agree(op, dtype) for op in parallel_random._LOOPS):
        pytest.skip("this PyTorch, on this processor, makes other numbers than the loops")
    assert by_loops == [True, True]


@pytest.mark.parametrize("where", [5, (1 << 20) - 7])
def test_where_the_loops_make_other_numbers_pytorch_draws(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(stream: Stream, into: torch.Tensor, *settings: float) -> None:
        Stream.uniform(stream, into, *settings)
        if into.numel() > where:
            into[where] += 1

    monkeypatch.setitem(parallel_random._LOOPS, parallel_random._UNIFORM, other)
    by_loops = counted(monkeypatch, "_draw_by_loops")
    parallel_random._loops_agree.cache_clear()
    try:
        assert_the_same(lambda t: t.uniform_(), torch.empty(3 << 20))
    finally:
        parallel_random._loops_agree.cache_clear()
    assert by_loops == [False]


def test_a_tensor_whose_first_elements_differ_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_random, "_loops_agree", lambda func, dtype: True)
    monkeypatch.setitem(parallel_random._LOOPS, parallel_random._UNIFORM, Stream.normal)
    assert_the_same(lambda t: t.uniform_(), torch.empty(3 << 20))


def test_parts_that_do_not_meet_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts = counted(monkeypatch, "_draw_in_parts")
    monkeypatch.setitem(parallel_random._WORDS, torch.float64, 1)
    assert_the_same(lambda t: t.uniform_(), torch.empty(3 << 20, dtype=torch.float64))
    assert in_parts == [False]


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
def test_what_is_drawn_in_another_way_is_left_alone(draw: Draw) -> None:
    assert_the_same(draw, torch.empty(1500, 1501))


def test_errors_are_pytorchs_and_leave_its_state() -> None:
    tensor, state = torch.empty(3 << 20, dtype=torch.float16), torch.get_rng_state()
    with SoonerDraws():
        for dtype in DTYPES:
            with pytest.raises(RuntimeError, match="std"):
                tensor.to(dtype).normal_(0.0, -1.0)
            with pytest.raises(RuntimeError, match="uniform_ expects"):
                tensor.to(dtype).uniform_(1.0, 0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_and_inference_mode_do_not_mind() -> None:
    with SoonerDraws():
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
