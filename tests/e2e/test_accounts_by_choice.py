"""The account of compute's memory for each choice of the saved values that stay, beside one made for that choice alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from marks import more
from torch import Tensor, fx, nn

from zinf_compile.backend.decide_memory import Cut
from zinf_compile.backend.remake import Remakable
from zinf_compile.cli.models import GPT
from zinf_compile.cli.trace import Recorder, run_on_fakes
from zinf_compile.config import Config
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import as_performed, copied, just_in_time
from zinf_compile.passes.analysis.compute_account import ForwardValues
from zinf_compile.passes.analysis.compute_choices import ChoiceAccounts
from zinf_compile.passes.analysis.compute_graph import ComputeGraph
from zinf_compile.passes.analysis.compute_memory import account_compute
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.graph.node_facts import mark_moving

DRAWN = 12
"""Choices of each pair of graphs, beside all and none."""


def gpt() -> tuple[nn.Module, Any]:
    return GPT(layers=3, width=32, heads=2, vocabulary=96, length=16), tuple(torch.zeros(2, 2, 16, dtype=torch.long))


class Views(nn.Module):
    """Saves values that are views of one another, one that the caller gets, and some that nothing of the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.relu(self.first(x))
        b = torch.sin(self.second(a.t().contiguous().t())) * a.chunk(2, 0)[0].repeat(2, 1)
        c, d = torch.exp(self.third(b)).split(12, 1)
        return torch.cat([d.sigmoid(), c * b[:, :12]], 1), a


def views() -> tuple[nn.Module, Any]:
    return Views(), torch.zeros(8, 24)


class Compared(Recorder):
    """Compares the accounts of a forward and its backward in which all that may leave does, and with blocks that run again.

    The ones that choices are made by say the same as those of graphs in which nothing else moves.
    """

    compared = 0

    def _decide_memory(self, cut: Cut) -> None:
        if len(cut.graphs) > 1:
            remakable = Remakable(*cut.graphs, bucket_bytes=cut.bucket_bytes, own_outputs=cut.own_outputs or 0)
            for again in sorted({0, remakable.blocks // 2, remakable.blocks}):
                self._compare(cut, remakable, again)
        super()._decide_memory(cut)

    def _compare(self, cut: Cut, remakable: Remakable, again: int) -> None:
        pair = [copied(gm) for gm in cut.graphs]
        if again:
            remakable.plan(*pair, again)
        memories = find_memories(*(gm.graph for gm in pair), own_outputs=cut.own_outputs or 0)
        scheduled = [just_in_time(gm, cut.bucket_bytes) for gm in pair]
        graphs = self._performed(scheduled, memories)
        forward = ChoiceAccounts(graphs[0], results=cut.own_outputs)
        backward = ChoiceAccounts(graphs[1], forward=forward)
        draw = random.Random(0)
        for number in range(DRAWN + 2):
            part = {0: 0.0, 1: 1.0}.get(number, draw.random())
            staying = [memory for memory in memories if draw.random() < part]
            stays = frozenset(name for memory in staying for name in memory.inputs)
            alone = account_compute(graphs[0], results=cut.own_outputs, stays=stays)
            behind = account_compute(graphs[1], forward=alone.handed, stays=stays)
            for found, expected in ((forward.account(stays), alone), (backward.account(stays), behind)):
                assert _told(found.handed) == _told(expected.handed)
                assert dataclasses.replace(found, handed=expected.handed) == expected
            assert stays <= alone.handed.memory_of.keys(), "the backward finds what stays"
            if number < 4:
                ahead, back = self._performed(scheduled, [memory for memory in memories if memory not in staying])
                first = account_compute(ahead, results=cut.own_outputs)
                assert alone.memory() == first.memory()
                assert behind.memory() == account_compute(back, forward=first.handed).memory()
            self.compared += 1
        assert forward.makes_sums
        assert backward.makes_sums

    def _performed(self, scheduled: Sequence[fx.GraphModule], moving: Sequence[SavedMemory]) -> list[ComputeGraph]:
        """Return a forward and its backward between which this moves."""
        assert self._budget is not None
        context, by_operator = self._budget.context, self.config.compute == "fx"
        forward, backward = scheduled
        mark_moving(forward, backward, tuple(dataclasses.replace(each, tier=Tier.NVME) for each in moving))
        graphs = [as_performed(gm.graph, hops=context.link.topology.hops) for gm in scheduled]
        return [ComputeGraph(graph, context.device, by_operator=by_operator) for graph in graphs]


def _told(handed: ForwardValues) -> object:
    return handed.memory_of, handed.bytes, handed.kept


@pytest.mark.parametrize(("device", "compute"), [("cpu", "fx"), ("cpu", "inductor"), ("cuda", "inductor")])
@pytest.mark.parametrize(("target", "tile"), [(gpt, None), (views, None), (views, "2KiB"), more(gpt, "2KiB")])
def test_two_accounts_make_all(target: Callable[[], tuple[nn.Module, Any]], tile: str | None, device: str, compute: str) -> None:
    given = {"compute": compute, "device_memory": "1GiB", "nvme": "/"} | ({} if tile is None else {"tile": tile})
    config = Config.from_options(given, check_folders=False)
    made: list[Compared] = []

    def compiler(number: int) -> Compared:
        made.append(Compared(config, number, [], world_size=1, after=None))
        return made[-1]

    run_on_fakes(target, compiler, world_size=1, device=device)
    (compared,) = made
    assert compared.compared >= DRAWN + 2
