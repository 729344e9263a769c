"""What is still being written when a value is replaced, and what is written behind the end of a shard."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_from_meta import built_whole, compare, made_on_meta, noticing_small_ones
from tiers import context_of
from torch import nn

from zinf_compile.init.shard_writer import Piece, PieceWriter
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

PIECES = {"compute_shape": {"piece_numel": 300}}


class Ties(nn.Linear):
    """Its `reset_parameters` replaces the weights of others as well."""

    def __init__(self, *sizes: int) -> None:
        self.others: list[nn.Linear] = []
        super().__init__(*sizes)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for other in self.others:
            other.weight.data = torch.full((40, 40), 3.0)


def test_a_value_that_is_replaced_while_it_is_being_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = PieceWriter.write
    late = []

    def slowly(self: PieceWriter, unit: Unit, piece: Piece, make: Callable[[torch.Tensor], object]) -> None:
        def later(into: torch.Tensor) -> None:
            time.sleep(0.02)  # what comes next must wait for it
            make(into)

        late.append(piece)
        write(self, unit, piece, later)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 40), Ties(40, 40))
        model[1].others.append(model[0])
        return model

    whole = built_whole(build)
    whole[0].weight.data = torch.full((40, 40), 3.0)
    monkeypatch.setattr(PieceWriter, "write", slowly)
    with noticing_small_ones():
        ours = made_on_meta(build, params="nvme", nvme=tmp_path, **PIECES)
    assert late
    compare(whole, ours)


def test_elements_behind_the_end_of_a_shard_are_zeros(tmp_path: Path) -> None:
    """Memory for pieces is used again, with what was in it."""
    model = made_on_meta(lambda: nn.Sequential(nn.Linear(40, 40)), params="nvme", nvme=tmp_path)
    parameter = model[0].weight
    assert isinstance(parameter, ShardedParameter)
    unit = parameter._zinf_unit
    writer = PieceWriter(context_of(model).memory.ledger)
    for valid in (1600, 1500):
        writer.write(unit, Piece(0, 1600, 0, valid), lambda into: into.fill_(7.0))
        writer.drain()
    writer.close()
    assert torch.equal(parameter.detach().clone().flatten(), torch.cat([torch.full((1500,), 7.0), torch.zeros(100)]))
