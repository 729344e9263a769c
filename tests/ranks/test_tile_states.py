"""A rank's optimizer states are of the elements it has; which these are depends on tiles, ranks and the order in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_tile_states import Tall, change_tiles
from ranks import run_ranks
from training import BACKEND, adamw

from zinf_compile.errors import UnsupportedOptimizerError

SAID = (
    "states of {name} for parameter up.weight, shape [64, 16], are of other elements than this rank has. Found: those of rank "
    "{found} of 2, in 4 tiles (option tile=1,024). Accepted: those of rank {rank} of 2, {own}, or whole ones, of the parameter's "
    'shape. Compile the model as it was when they were saved, on 2 ranks with options={{"tile": 1024}}, and give each rank what '
    "it saved itself; or there and then save whole ones, by zinf_compile.full_optimizer_state_dict, which load under any tile "
    "and on any number of ranks"
)
WARNED = "they are taken for those of rank {rank} of 2, in 4 tiles (option tile=1,024). If they were saved on another rank or"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("AdamW", ()),
        ("SGD", ("grads",)),
        more("SGD", ("optimizer",)),
        more("AdamW", ("params", "grads", "optimizer")),
    ],
)
def test_states_under_another_tile(name: str, tiers: tuple[str, ...], tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(change_tiles, 2, str(tmp_path), name, tiers)):
        in_two, at_once, of_another, between_steps, warned = said
        assert in_two == SAID.format(name=name, rank=rank, found=rank, own="in 2 tiles (option tile=2,048)")
        assert at_once == between_steps == SAID.format(name=name, rank=rank, found=rank, own="not in tiles")
        assert of_another == SAID.format(name=name, rank=rank, found=1 - rank, own="in 4 tiles (option tile=1,024)")
        assert WARNED.format(rank=rank) in warned


def trained(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Tall()
    model.compile(backend=BACKEND, options=options)
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 16)).backward()
    optimizer.step()
    return model, optimizer


def test_one_rank_saves_and_loads_whole_states_in_any_tiles() -> None:
    saved = trained(tile=1024)[1].state_dict()
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in saved["state"].values())
    _, optimizer = trained(tile=2048)
    optimizer.load_state_dict(saved)
    optimizer.step()


NOTES = {
    "rank 1 of 2, not in tiles. Accepted: those of rank 0 of 1, not in tiles, or": (1, 2, (0, 1), ((512, 1024),)),
    "on 2 ranks without tiles (where device_memory is given: with a tile": (1, 2, (0, 1), ((512, 1024),)),
    "rank 0 of 1, not in tiles, dimensions in memory in the order (1, 0). Accepted": (0, 1, (1, 0), ((0, 1024),)),
}


@pytest.mark.parametrize("text", NOTES)
def test_states_of_another_number_of_ranks_or_order(text: str) -> None:
    _, optimizer = trained()
    rank, ranks, order, elements = NOTES[text]
    note = {"rank": rank, "ranks": ranks, "tile": None, "order": order, "elements": elements}
    optimizer.state_dict()["state"][0]["zinf_layout"] = note
    with pytest.raises(UnsupportedOptimizerError, match=re.escape(text)):
        optimizer.step()
