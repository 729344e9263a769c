"""Values that are noted to be drawn, and made later: the same bits, each rank its own pieces, each written once."""

from __future__ import annotations

import collections
import errno
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing
from models import CASES
from rank_from_meta import REBUILT, assert_born, built_whole, compare, made_on_meta, noticing_small_ones
from tiers import context_of
from torch import nn
from transformer_models import bert, gpt2, llama, t5

import zinf_compile
from zinf_compile.errors import StoreError
from zinf_compile.init.deferred_fills import DeferredFills
from zinf_compile.init.shard_writer import Piece, PieceWriter
from zinf_compile.runtime.units.unit import Unit

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

PIECES = {"compute_shape": {"piece_numel": 300}}
"""An option under which values go to drives in several pieces."""


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of what is noted."""
    names: list[str] = []
    note = DeferredFills.note

    def noting(self: DeferredFills, newborn: Any, *arguments: Any) -> bool:
        done = note(self, newborn, *arguments)
        names.extend([newborn._zinf_materialization.name] if done else [])
        return done

    monkeypatch.setattr(DeferredFills, "note", noting)
    with noticing_small_ones():
        yield names


MODELS: dict[str, Callable[[], nn.Module]] = {**REBUILT, "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"params": "nvme"}, {"params": "nvme", "tile": "512 B"}], ids=["here", "drive", "tiles"])
def test_a_model_has_the_numbers_of_one_built_whole(name: str, options: dict[str, Any], noted: list[str], tmp_path: Path) -> None:
    place = {"nvme": tmp_path, **PIECES} if options else {}
    assert_born(MODELS[name], functools.partial(made_on_meta, **options, **place))
    large = [p for p in MODELS[name]().parameters() if p.numel() >= 100 and p.dim() > 1]
    assert noted or not large


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_what_is_drawn_may_be_read_changed_and_drawn_again(tier: str, tmp_path: Path) -> None:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(2)
                nn.init.normal_(module.weight, std=float(module.weight.std()))
                module.weight[:2].zero_()
        if isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -1, 1)
            nn.init.normal_(module.weight, std=0.1)
        if isinstance(module, nn.Sequential):
            nn.init.kaiming_uniform_(module[1].weight)
            module[2].weight.data.add_(module[1].weight[:12, :12].sum())
            nn.init.trunc_normal_(module[3].weight)

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 40), nn.Linear(40, 30), nn.Linear(30, 20))

    whole = built_whole(build).apply(change)
    random = torch.get_rng_state()
    ours = made_on_meta(build, init=change, **({"params": tier, "nvme": tmp_path, **PIECES} if tier == "nvme" else {}))
    assert torch.equal(torch.get_rng_state(), random)
    compare(whole, ours)


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_what_is_drawn_may_be_replaced(tier: str, tmp_path: Path) -> None:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data = torch.full_like(module.weight, 3.0)
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(torch.full((50, 12), 5.0))

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 40), nn.Linear(40, 30))

    whole = built_whole(build).apply(change)
    compare(whole, made_on_meta(build, init=change, **({"params": tier, "nvme": tmp_path, **PIECES} if tier == "nvme" else {})))


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_what_fails_to_fill_a_value_leaves_what_it_was(tier: str, tmp_path: Path) -> None:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with pytest.raises(RuntimeError), torch.no_grad():
                module.weight.copy_(torch.zeros(7))
            with pytest.raises(RuntimeError):
                nn.init.normal_(module.weight, std=-1.0)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 40), nn.Linear(40, 30))

    whole = built_whole(build).apply(change)
    compare(whole, made_on_meta(build, init=change, **({"params": tier, "nvme": tmp_path, **PIECES} if tier == "nvme" else {})))


@pytest.mark.parametrize("build", [gpt2, lambda: nn.Sequential(*[nn.Linear(30, 30) for _ in range(4)])], ids=["again", "once"])
def test_each_piece_is_written_once(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: collections.Counter[tuple[int, int]] = collections.Counter()
    write = PieceWriter.write

    def count(self: PieceWriter, unit: Unit, piece: Piece, make: Callable[[torch.Tensor], object]) -> None:
        written[unit.serial, piece.first] += 1
        write(self, unit, piece, make)

    monkeypatch.setattr(PieceWriter, "write", count)
    made_on_meta(build, params="nvme", nvme=tmp_path, **PIECES)
    assert len(written) > 4
    assert set(written.values()) == {1}


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_drive_that_fails_leaves_the_model_on_meta(number: int, noted: list[str], tmp_path: Path) -> None:
    context = context_of(made_on_meta(CASES["mlp"].build))
    noted.clear()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(3)])
    with failing(context.engine, "write", number), pytest.raises(StoreError, match="cannot write bytes") as raised:
        zinf_compile.partition(model, params="nvme", nvme=tmp_path, **PIECES)
    assert raised.value.errno == errno.EIO
    assert noted
    del raised
    gc.collect()
    assert context.memory.host_ledger.now()["staging"] == 0
    assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())
    zinf_compile.partition(model, params="nvme", nvme=tmp_path, **PIECES)  # nothing is in the way
