"""What Inductor can't compile runs operator by operator, with one warning that says what and why; or raises, if asked to."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from near import assert_near
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.lowering import lowerings
from torch.fx.experimental.proxy_tensor import make_fx
from training import twins, whole_gradient

from zinf_compile import CompilationError
from zinf_compile.backend import regions
from zinf_compile.backend.regions import describe_refusal

pytestmark = pytest.mark.slow

library = torch.library.Library("zinf_test_refusals", "DEF")
library.define("opaque(Tensor x) -> Tensor")
library.impl("opaque", torch.clone, "CompositeExplicitAutograd")


class Layers(nn.Module):
    """Four layers, each a region of its own; one adds what an operator unknown to Inductor makes."""

    def __init__(self, *, opaque: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.opaque = opaque

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = torch.ops.zinf_test_refusals.opaque(x) if self.opaque else x
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (offset.cos() if number == 2 else 0)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _nothing_compiled_nor_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    regions.prepare(torch.device("cpu"))  # the import of Inductor warns, too
    monkeypatch.setattr(regions, "_shared", {})
    monkeypatch.setattr(regions, "_warned", set())


def assert_trains_near_eager(*, opaque: bool, **options: Any) -> None:
    eager, ours = twins(lambda: Layers(opaque=opaque))
    compiled = torch.compile(ours, backend="zero_infinity", options={"bucket": 1, **options})
    for seed in range(2):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        eager.zero_grad()
        ours.zero_grad()
        losses = [model(x) for model in (compiled, eager)]
        assert_near("loss", *losses)
        for loss in losses:
            loss.backward()
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            assert_near("gradient", whole_gradient(other), one.grad)


OPERATOR = r"\(operator zinf_test_refusals\.opaque\.default, .*missing lowering\)"


def test_a_refused_region_runs_by_operator_with_one_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    by_operator = regions.run_by_operator
    monkeypatch.setattr(regions, "run_by_operator", lambda region: ran.append(region.code) or by_operator(region))
    message = rf"{OPERATOR}; it runs operator by operator.*on_refusal='error'"
    with inductor_config.patch(implicit_fallbacks=False), pytest.warns(UserWarning, match=message) as caught:
        assert_trains_near_eager(opaque=True)
    assert len(caught) == 1
    assert ["opaque" in code for code in ran] == [True], "the others were compiled"


def test_as_an_error_it_comes_before_anything_is_partitioned_with_all_that_inductor_says() -> None:
    model = Layers(opaque=True)
    compiled: Any = torch.compile(model, backend="zero_infinity", options={"bucket": 1, "on_refusal": "error"})
    for _ in range(2):  # the second time, too
        with inductor_config.patch(implicit_fallbacks=False), pytest.raises(CompilationError, match=OPERATOR) as raised:
            compiled(torch.ones(5, 6))
        assert "With on_refusal='fx' it runs operator by operator" in str(raised.value)
        assert "Inductor said:\nMissingOperatorWithoutDecomp: missing lowering\n  target: zinf_test" in str(raised.value)
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    compiled(torch.ones(5, 6)).backward()


def test_a_region_run_by_operator_is_an_error_for_who_asks_for_one() -> None:
    with inductor_config.patch(implicit_fallbacks=False):
        with pytest.warns(UserWarning, match=OPERATOR):
            assert_trains_near_eager(opaque=True)
        torch.compiler.reset()
        with pytest.raises(CompilationError, match=OPERATOR):
            assert_trains_near_eager(opaque=True, on_refusal="error")


def test_errors_that_name_no_operator_show_their_first_line() -> None:
    assert describe_refusal(ValueError("one\ntwo")) == "ValueError: one"
    assert describe_refusal(ValueError()) == "ValueError: "
    assert (
        describe_refusal(ValueError("bad\n  target: aten.mm.default\n  args[0]: x"))
        == "operator aten.mm.default, ValueError: bad"
    )


def below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "cache"


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "below a file": (below_a_file, "Not a directory"),
    "where nothing can be created": (lambda _: Path("/proc"), ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_cache_directory_that_cannot_be_written_to(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, why = PLACES[place]
    directory = find(tmp_path)
    message = rf"cache directory {directory} can't be written to: {why}.*set TORCHINDUCTOR_CACHE_DIR to a directory that"
    eager, ours = twins(lambda: Layers(opaque=False))
    compiled = torch.compile(ours, backend="zero_infinity", options={"bucket": 1})
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))  # PyTorch itself looks at it in torch.compile
        with pytest.warns(UserWarning, match=message) as caught:
            loss = compiled(torch.ones(5, 6))
        loss.backward()
    assert len(caught) == 1
    assert_near("loss", loss, eager(torch.ones(5, 6)))
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trains_near_eager(opaque=False)  # a directory that can be written to is used, in the same process


def test_such_a_cache_directory_as_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(opaque=False)
    compiled = torch.compile(model, backend="zero_infinity", options={"on_refusal": "error"})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(below_a_file(tmp_path)))
    with pytest.raises(CompilationError, match=r"cache directory .*file/cache can't be written to: Not a directory"):
        compiled(torch.ones(5, 6))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_by_operator_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = twins(lambda: Layers(opaque=False))
    compiled = torch.compile(ours, backend="zero_infinity", options={"compute": "fx"})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(below_a_file(tmp_path)))
    assert torch.equal(compiled(torch.ones(5, 6)), eager(torch.ones(5, 6)))


FRESH = """
import torch
from zinf_compile.cli.models import MLP
model = MLP(4, 8)
loss = torch.compile(model, backend="zero_infinity")(torch.ones(2, 4)).sum()
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("trained")
"""


def test_in_a_fresh_process_it_is_one_warning_too() -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/proc"}
    run = subprocess.run([sys.executable, "-c", FRESH], env=environment, check=False, capture_output=True, text=True)
    assert run.stdout == "trained\n", run.stderr
    assert run.stderr.count("Warning") == 1, run.stderr
    assert "its cache directory /proc can't be written to" in run.stderr
    assert "Traceback" not in run.stderr


def test_products_added_in_place_compile_where_ci_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Inductor refuses operators that have a decomposition, unless it was told to call them."""
    products = (torch.ops.aten.addmm_.default, torch.ops.aten.baddbmm_.default)
    regions.prepare(torch.device("cpu"))
    for product in products:
        monkeypatch.delitem(lowerings, product, raising=False)
    monkeypatch.setenv("CI", "true")

    def add(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return products[0](total.cos(), a, b), products[1](totals.cos(), totals, totals)

    values = [torch.randn(5, 5), torch.randn(5, 5), torch.randn(5, 5), torch.randn(3, 5, 5)]
    graph = make_fx(add, tracing_mode="fake")(*values)
    compiled = regions.SharedRegion(graph, backward=False).compile()
    for found, expected in zip(compiled(list(values)), add(*values), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("place", "reason", "times"),
    [("cache", "file too short", 2), ("cache", "undefined symbol: gone", 1), ("elsewhere", "invalid ELF header", 1)],
)
def test_a_damaged_library_in_the_cache_is_made_anew(
    place: str, reason: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a killed process leaves one. Others stay where they are: the region runs operator by operator."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    damaged = tmp_path / place / "ab" / "cab.main.so"
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    calls = 0

    def compile_once(*args: Any, **settings: Any) -> Callable[[list[Any]], list[Any]]:
        nonlocal calls
        calls += 1
        if damaged.exists():
            raise ImportError(f"{damaged}: {reason}")
        return lambda values: values

    monkeypatch.setattr(regions, "compile_with_inductor", compile_once)
    gm = make_fx(lambda x: [torch.tanh(x) + 1])(torch.randn(3))
    made = regions.InductorRegions()
    made.collect(gm, backward=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.compile(rank=0, ranks=1)
    assert (calls, damaged.exists(), len(caught)) == (times, times == 1, times == 1)
