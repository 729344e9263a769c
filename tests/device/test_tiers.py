"""Where states live changes no bit on a device either, and moves the bytes it must and no more; see tests/tiers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_late import on_device
from rank_row_rounds import SHAPES, look_up_anywhere
from rank_tiers import train_everywhere, train_in_folders
from rank_tiling import Huge, live_in_tiles, train_batches, train_beyond_the_cap, train_in_tiles_of_ranks
from ranks import run_ranks
from tiers import PAIRS, PLACEMENTS, Placement

FLOAT, BRAIN = torch.float32, torch.bfloat16
RANKS = [1, pytest.param(2, marks=pytest.mark.distributed)]


def run_on_device(ranks: int, *args: Any, alone: bool = False) -> list[Any]:
    """Call `on_device`: of a single rank in this process, of several perhaps `alone`, see `run_ranks`."""
    return [on_device(0, 1, *args)] if ranks == 1 else run_ranks(on_device, ranks, *args, alone=alone, backend="late")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("dtype", "placements", "steps"),
    [(FLOAT, PAIRS, 2), more(FLOAT, PLACEMENTS, 4), more(BRAIN, PLACEMENTS, 4)],
    ids=["fp32-pairs", "fp32", "bf16"],
)
def test_the_bits_of_the_cpu(ranks: int, dtype: torch.dtype, placements: list[Placement], steps: int, tmp_path: Path) -> None:
    """Loss, parameters and states after some steps; bytes over each link at every step."""
    options = (str(tmp_path), dtype, "fx", steps, (None,), 96, None, None, placements)
    assert run_on_device(ranks, 1, train_everywhere, *options) == [len(placements)] * ranks


@pytest.mark.parametrize("placements", [PAIRS[1::4], more(PLACEMENTS)], ids=["few", "all"])
@pytest.mark.parametrize(
    ("dtype", "master", "reduced", "ranks"),
    [
        (BRAIN, "float32", None, 1),
        more(BRAIN, "float32", None, 2),
        pytest.param(FLOAT, None, BRAIN, 2, marks=pytest.mark.distributed),
    ],
    ids=["bf16", "bf16 on two ranks", "fp32 reduced in bf16"],
)
def test_other_types_wherever_parameters_are_updated(
    dtype: torch.dtype, master: str | None, reduced: torch.dtype | None, ranks: int, placements: list[Placement], tmp_path: Path
) -> None:
    """A master copy beside the states, and gradients reduced in another type; bytes over each link at every step."""
    options = (str(tmp_path), dtype, "fx", 3, ("host", "device"), 8192, master, reduced, placements)
    assert run_on_device(ranks, 1, train_everywhere, *options) == [2 * len(placements)] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_states_striped_over_two_folders(ranks: int, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for counts in run_on_device(ranks, 1, train_in_folders, [str(folder) for folder in folders], 3):
        for written in counts:
            assert written.keys() == {str(folder) for folder in folders}
            assert min(written.values()) > 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.mark.distributed
@pytest.mark.parametrize("pair", [more(False), True], ids=["one", "pair"])
def test_each_rank_in_a_folder_of_its_own(pair: bool, tmp_path: Path) -> None:
    for name in ("rank0", "rank1", "second0", "second1"):
        (tmp_path / name).mkdir()
    nvme = [str(tmp_path / name) for name in ("rank{local_rank}", "second{local_rank}")[: 1 + pair]]
    for rank, counts in enumerate(run_on_device(2, 1, train_in_folders, nvme if pair else nvme[0], 3)):
        for written in counts:
            assert written.keys() == {path.replace("{local_rank}", str(rank)) for path in nvme}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("dtype", "placements"),
    [(FLOAT, PAIRS[::3]), (BRAIN, PAIRS[1::4]), more(FLOAT, PLACEMENTS), more(BRAIN, PLACEMENTS)],
    ids=["few", "bf16-few", "all", "bf16-all"],
)
def test_tiles_anywhere(ranks: int, dtype: torch.dtype, placements: list[Placement], tmp_path: Path) -> None:
    """Of large parameters, and lookups in one of them."""
    call = functools.partial(train_in_tiles_of_ranks, dtype=dtype, compute="fx", fake=False, placements=placements)
    assert run_on_device(ranks, 1, call, str(tmp_path)) == [len(placements)] * ranks


@pytest.mark.parametrize("placements", [[("host", "nvme", "host")], more(PLACEMENTS)], ids=["one", "all"])
def test_a_weight_of_eight_times_what_the_device_may_hold(placements: list[Placement], tmp_path: Path) -> None:
    """All that the device's allocator gives out counts, from the time when the model is made."""
    (losses,) = run_on_device(1, 1, functools.partial(train_beyond_the_cap, placements=placements), str(tmp_path))
    torch.manual_seed(0)
    torch.testing.assert_close(losses, train_batches(Huge(), seed=0, rows=2), rtol=1e-5, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize("placements", [[("host", "nvme", "host")], more(PLACEMENTS)], ids=["one", "all"])
def test_the_same_on_two_ranks(placements: list[Placement], tmp_path: Path) -> None:
    """In processes of their own: what a seeded defect has left counts too."""
    train = functools.partial(train_beyond_the_cap, placements=placements)
    one, other = run_on_device(2, 1, train, str(tmp_path), alone=True)
    assert one != other


@pytest.mark.parametrize("ranks", [1, more(3)])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_born_saved_and_loaded_in_tiles(ranks: int, tier: str, tmp_path: Path) -> None:
    run_on_device(ranks, 1, live_in_tiles, str(tmp_path), tier)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("every", [False, more(True)])
def test_rows_of_tiles(ranks: int, every: bool, tmp_path: Path) -> None:
    shapes = SHAPES if every else SHAPES[:2]
    counts = run_on_device(ranks, 1, functools.partial(look_up_anywhere, shapes=shapes, every=every), str(tmp_path))
    assert min(counts) >= len(shapes)
