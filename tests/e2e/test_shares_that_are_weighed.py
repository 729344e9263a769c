"""How long blocks that run again take at least, which says what shares of them are weighed against moving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from capped_blocks import machine
from torch import Tensor, nn

from zinf_compile.backend import decide_memory
from zinf_compile.backend.decide_memory import Cut
from zinf_compile.backend.remake import Remakable
from zinf_compile.backend.step_account import StepAccount
from zinf_compile.cli.trace import Recorder, run_on_fakes
from zinf_compile.config import Config
from zinf_compile.passes import copied, just_in_time
from zinf_compile.plan.rates import Rates

BLOCKS = 11


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def target(width: int, inner: int, rows: int) -> tuple[nn.Module, Any]:
    blocks = nn.Sequential(*(Block(width, inner) for _ in range(BLOCKS)))
    return nn.Sequential(blocks, nn.Linear(width, 8)), torch.zeros(rows, width)


class Compared(Recorder):
    """Notes for each number of blocks the least seconds of compute, and the seconds where the graphs are scheduled for it."""

    seconds: list[tuple[float, float]]

    def _decide_memory(self, cut: Cut) -> None:
        assert self._budget is not None
        context = self._budget.context
        graphs = [just_in_time(gm, cut.bucket_bytes).graph for gm in cut.graphs]
        account = StepAccount(graphs, context, self._budget.placements, Rates.of("cpu", self.config.machine_name()))
        remakable = Remakable(*cut.graphs, bucket_bytes=cut.bucket_bytes, own_outputs=cut.own_outputs or 0)
        self.seconds = []
        for blocks in range(1, remakable.blocks + 1):
            copies = [copied(gm) for gm in cut.graphs]
            remakable.plan(*copies, blocks)
            scheduled = [just_in_time(gm, cut.bucket_bytes).graph for gm in copies]
            again = account.again(scheduled, blocks)
            least = account.least_seconds_again(remakable.compute_of(blocks))
            self.seconds.append((least, account.problem.compute_seconds + again.seconds))
        super()._decide_memory(cut)


@pytest.mark.parametrize(("width", "inner", "rows"), [(512, 2048, 1024), (64, 64, 4096), (2048, 32, 8)])
def test_no_share_takes_less_than_its_operations_beside_all_else(width: int, inner: int, rows: int, tmp_path: Path) -> None:
    """Of compute that is bound by operations, and by memory: there the forward's regions write less where values are dropped."""
    profile = str(machine(tmp_path / "machine.json", drive=1e9))
    config = Config.from_options({"compute": "fx", "device_memory": "64GiB", "machine": profile}, check_folders=False)
    made: list[Compared] = []

    def compiler(number: int) -> Compared:
        made.append(Compared(config, number, [], world_size=2, after=None))
        return made[-1]

    run_on_fakes(lambda: target(width, inner, rows), compiler, world_size=2, device="cpu")
    (compared,) = made
    assert len(compared.seconds) == BLOCKS
    assert all(least <= taken * (1 + 1e-9) for least, taken in compared.seconds)
    first, last = compared.seconds[0][0], compared.seconds[-1][0]
    assert first < last, "more blocks take longer"


@pytest.mark.parametrize(("rates", "weighed"), [({"drive": 1e15}, False), ({"drive": 1e4}, True)])
def test_shares_that_compute_alone_rules_out_are_not_weighed(
    rates: Mapping[str, float], weighed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive so fast that all that leaves moves beside compute, and one so slow that everything runs again."""
    counts: list[int] = []
    weigh = decide_memory._Decision._weigh

    def noted(self: Any, account: StepAccount, count: int) -> None:
        counts.append(count)
        weigh(self, account, count)

    monkeypatch.setattr(decide_memory._Decision, "_weigh", noted)
    options: dict[str, Any] = {
        "compute": "fx",
        "device_memory": "400MiB",
        "params": "device",
        "grads": "device",
        "optimizer": "device",
        "nvme": "/",
        "machine": str(machine(tmp_path / "machine.json", **rates)),
    }
    config = Config.from_options(options, check_folders=False)
    made: list[Recorder] = []

    def compiler(number: int) -> Recorder:
        made.append(Recorder(config, number, [], world_size=1, after=None))
        return made[-1]

    run_on_fakes(lambda: target(256, 1024, 8192), compiler, world_size=1, device="cpu")
    saved = made[0].decided.saved
    assert (saved.get("recompute", 0) > 0) == weighed
    assert (saved.get("nvme", 0) > 0) == (not weighed)
    assert bool(counts) == weighed
