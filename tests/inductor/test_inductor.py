"""compute="inductor": regions compiled once per structure, with eager's numbers within rounding and eager's random numbers."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import more
from torch import fx, nn
from torch._inductor.async_compile import AsyncCompile

from zinf_compile.backend import regions as inductor
from zinf_compile.backend.regions import InductorRegions, SharedRegion, structure
from zinf_compile.cli.models import GPT
from zinf_compile.passes.lower import run_by_operator
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.slow

OPTIONS = {"compute": "inductor", "bucket": "16KiB"}


@dataclasses.dataclass
class Counts:
    asked: int = 0
    compiled: int = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Count regions, from an empty cache."""
    found = Counts()
    collect, resolve = InductorRegions.collect, SharedRegion.resolve

    def counting_collect(self: InductorRegions, region: fx.GraphModule, *, backward: bool) -> Any:
        found.asked += 1
        return collect(self, region, backward=backward)

    def counting_resolve(self: SharedRegion, fn: Any) -> None:
        found.compiled += 1
        resolve(self, fn)

    monkeypatch.setattr(inductor, "_shared", {})
    monkeypatch.setattr(InductorRegions, "collect", counting_collect)
    monkeypatch.setattr(SharedRegion, "resolve", counting_resolve)
    return found


def gpt(layers: int) -> GPT:
    torch.manual_seed(1)
    return GPT(layers=layers, width=24, heads=2, vocabulary=37, length=16)


def tokens(seed: int, batch: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(37, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_near_eager(model: nn.Module, batches: list[tuple[torch.Tensor, ...]]) -> None:
    """Train beside eager with SGD; one operator's rounding apart, no more: 1e-5 of each tensor's largest element."""
    eager = copy.deepcopy(model)
    model.compile(backend="zero_infinity", options=OPTIONS)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (eager, model)]
    for number, batch in enumerate(batches):
        for side, optimizer in zip((eager, model), optimizers, strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            side(*batch).backward()
            optimizer.step()
        for (name, expected), found in zip(eager.named_parameters(), model.parameters(), strict=True):
            scale = float(expected.detach().abs().max())
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-5 * scale, msg=f"{name}, step {number}")


def test_training_is_near_eager() -> None:
    assert_near_eager(gpt(2), [(tokens(s), tokens(s + 1)) for s in range(3)])


def test_dynamic_shapes_are_near_eager() -> None:
    assert_near_eager(gpt(2), [(tokens(b, b, n), tokens(b + 1, b, n)) for b, n in ((3, 16), (4, 11), (2, 9))])


class Dropping(nn.Module):
    """Two blocks with dropout and a mutated buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(9, 9) for _ in range(2)])
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.dropout(torch.tanh(block(x)), 0.3, self.training)
        self.count.add_(1)
        return x.square().sum() * self.count


def test_dropout_draws_eagers_numbers() -> None:
    torch.manual_seed(2)
    model = Dropping()
    assert_near_eager(model, [(torch.randn(5, 9),) for _ in range(3)])
    assert model.count == 3


def test_copies_compile_without_inductors_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor starts threads when it first compiles; a copy of the process doesn't have them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    AsyncCompile.pool().submit(int).result()
    x = torch.randn(3, 7)
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
    expected = model(x).exp()
    found = torch.compile(lambda x: model(x).exp(), backend="zero_infinity", options={"bucket": "64B"})(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("half", [False, more(True)])
def test_depth_adds_no_compilation(counts: Counts, half: bool) -> None:
    compiled = []
    for layers in (3, 6):
        torch.compiler.reset()
        inductor._shared.clear()
        counts.compiled = counts.asked = 0
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = torch.compile(gpt(layers), backend="zero_infinity", options=OPTIONS)(tokens(0), tokens(1))
        loss.backward()
        compiled.append(counts.compiled)
        assert counts.asked > 2 * layers
    assert compiled[0] == compiled[1]


def test_a_region_inductor_refuses_runs_by_operator_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(region: fx.GraphModule, **settings: Any) -> Any:
        raise NotImplementedError("no such lowering: addmm")

    monkeypatch.setattr(inductor, "compile_with_inductor", refuse)
    monkeypatch.setattr(inductor, "_shared", {})
    monkeypatch.setattr(inductor, "_warned", set())
    model = gpt(2)
    with pytest.warns(UserWarning, match=r"NotImplementedError: no such lowering: addmm.*runs operator by operator") as caught:
        assert_near_eager(model, [(tokens(0), tokens(1))])
    assert len(caught) == 1


def region_of(function: Any, *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    return make_fx(function, tracing_mode=mode)(*inputs)


@pytest.mark.parametrize(("mode", "compilations"), [("fake", 1), ("symbolic", 2)])
def test_graphs_share_what_no_symbol_ties_to_one_of_them(mode: str, compilations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[fx.GraphModule] = []
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda region, **settings: built.append(region))
    monkeypatch.setattr(inductor, "_shared", {})
    for _ in range(2):
        regions = InductorRegions()
        for _ in range(3):
            region = region_of(lambda x, y: (x * y.relu(),), torch.zeros(3, 5), torch.zeros(3, 5), mode=mode)
            regions.collect(region, backward=False)
        regions.compile(rank=0, ranks=1)
    assert len(built) == compilations


@pytest.mark.parametrize(("rank", "order"), [(0, [1, 2, 3, 4]), (1, [3, 4, 1, 2])])
def test_ranks_begin_with_different_regions(rank: int, order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda region, **settings: built.append(len(region.graph.nodes) - 2))
    monkeypatch.setattr(inductor, "_shared", {})
    monkeypatch.setattr(inductor, "inductor_processes", lambda: 1)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    regions = InductorRegions()
    chains = [lambda x: (x.relu(),), lambda x: (x.relu().exp(),), lambda x: (x.relu().exp().sin(),)]
    for chain in (*chains, lambda x: (x.relu().exp().sin().cos(),)):
        regions.collect(region_of(chain, torch.zeros(3)), backward=False)
    regions.compile(rank=rank, ranks=2)
    assert built == order


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y: (x + y,), (torch.zeros(3, 5), torch.zeros(3, 5))),
        (lambda x, y: (x * y.relu(),), (torch.zeros(3, 4), torch.zeros(3, 4))),
        (lambda x, y: (y * x.relu(),), (torch.zeros(3, 5), torch.zeros(3, 5))),
        (lambda x, y: (x * y.relu() * 2,), (torch.zeros(3, 5), torch.zeros(3, 5))),
        (lambda x, y: (x * y.relu(),), (torch.zeros(5, 3).t(), torch.zeros(3, 5))),
        (lambda x, y: (x * y.relu(),), (torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.float64))),
    ],
)
def test_what_differs_is_compiled_apart(function: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    known = region_of(lambda x, y: (x * y.relu(),), torch.zeros(3, 5), torch.zeros(3, 5))
    assert structure(region_of(function, *inputs)) != structure(known)


def test_names_do_not_matter() -> None:
    first = region_of(lambda x, y: (x * y.relu(),), torch.zeros(3, 5), torch.zeros(3, 5))
    second = region_of(lambda left, right: (left * right.relu(),), torch.ones(3, 5), torch.ones(3, 5))
    for node in second.graph.nodes:
        node.name = f"other_{node.name}"
    assert structure(first) == structure(second)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(run_by_operator(first)([x, y])[0], x * y.relu())


def test_ordinary_parameters_train_to_the_same_bits() -> None:
    """Without options nothing moves; equal blocks are compiled once, as those of partitioned parameters, and round as they do."""
    found = []
    for options in ({}, {"params": "device"}):
        torch.compiler.reset()
        model = gpt(3)
        call: Any = torch.compile(model, backend="zero_infinity", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step in range(3):
            call(tokens(step), tokens(step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        assert {type(p) for p in model.parameters()} == {ShardedParameter if options else nn.Parameter}
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_equal_blocks_of_ordinary_parameters_are_compiled_once(counts: Counts) -> None:
    compiled = []
    for layers in (2, 5):
        torch.compiler.reset()
        model = gpt(layers)
        torch.compile(model, backend="zero_infinity")(tokens(0), tokens(1)).backward()
        compiled.append(counts.compiled)
    assert counts.asked > 2 * 5
    assert compiled[1] <= compiled[0] + 2, "the first and the last block, whose neighbours are others"
