"""What a region leaves behind never lies in a unit's memory that was released: else it would change once that is used anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from irtext import graph_of, unit
from marks import more
from models import CASES, Case
from ranks import run_ranks
from storage_watch import Watch, released_early, train_watched, watch_on_a_rank
from transformer_models import TRANSFORMERS

from zinf_compile.cli.models import GPT
from zinf_compile.ir.program import Program
from zinf_compile.passes.lower import lower
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.executor import execute
from zinf_compile.runtime.units.create import make_shards
from zinf_compile.runtime.units.unit import Unit


def gpt() -> Case:
    def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, ...]:
        rows = torch.randint(37, (2, 3, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        return rows[0], rows[1]

    return Case(lambda: GPT(layers=2, width=24, heads=2, vocabulary=37, length=16), batch)


FURTHER, SLOWLY = ("qwen2", "llama"), (("gpt", "inductor"), ("mutated_buffers", "inductor"))
MODELS: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "qwen2": lambda: TRANSFORMERS["qwen2"],
    "llama": lambda: TRANSFORMERS["llama"],
    **{
        name: lambda name=name: CASES[name]  # type: ignore[misc]
        for name in ("tied", "checkpoint", "checkpoint_reentrant", "returns_parameters", "odd_shapes", "mutated_buffers")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compute", "bucket"),
    [
        more(name, *how) if name in FURTHER or (name, how[0]) in SLOWLY else (name, *how)
        for name in MODELS
        for how in (("fx", 512), ("fx", "32MiB"), ("inductor", "4KiB"))
    ],
)
def test_no_live_value_lies_in_a_released_unit(name: str, compute: str, bucket: int | str) -> None:
    case = MODELS[name]()
    watch = train_watched(case.build, case.batch, {"compute": compute, "bucket": bucket})
    assert watch.checks > 4
    assert watch.releases > 4


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("compute", ["fx", more("inductor")])
def test_on_two_ranks(compute: str) -> None:
    for releases in run_ranks(watch_on_a_rank, 2, ["tied", "checkpoint", "returns_parameters"], compute):
        assert min(releases) > 4


def test_a_release_that_comes_early_is_found() -> None:
    case = CASES["mlp"]
    with pytest.raises(
        AssertionError, match=r"in the forward of graph \d+, a live value of shape \[.*\] lies in a released unit"
    ):
        train_watched(case.build, case.batch, {"bucket": 512}, change=released_early)


BLOCKS = "g = all_gather(w); v = wait(g); t = t(v); {before}k = all_gather(e); u = wait(k); b = mm(t, u); release(u); {after}"


@pytest.mark.parametrize(("place", "found"), [("after", False), ("before", True)])
def test_a_view_that_outlives_its_unit_is_found(place: str, found: bool) -> None:
    text = BLOCKS.format(**{"before": "", "after": "", place: "release(v); "}) + "return (b,)"
    watch = Watch()
    program = watch.watched(lower(graph_of(text, w=unit(4, 4), e=unit(4, 4)), name="graph"))
    if found:
        with pytest.raises(AssertionError, match=r"in the graph, a live value of shape \[4, 4\] lies in a released unit"):
            run(program)
    else:
        run(program)
    assert watch.releases == 1 + (not found)


def run(program: Program) -> list[Any]:
    """Execute a program of units alone on one process."""
    context = Context(None, torch.device("cpu"), timeout_s=1)
    parameters = [torch.randn(slot.shape) for slot in program.slots.values()]
    shards = make_shards(parameters, context.ranks.shard_group)
    units = {
        register: Unit(parameter, shard, name=slot.name, context=context)
        for (register, slot), parameter, shard in zip(program.slots.items(), parameters, shards, strict=True)
    }
    hollow = [torch.empty(0) for _ in parameters]
    return execute(program, units, context, list(hollow), lambda unit, shard, pending: shard)
