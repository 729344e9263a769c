"""Where states live changes no bit, and moves the bytes it must and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_tiers import train_everywhere, train_in_folders, train_without_a_device
from ranks import run_ranks
from tiers import PAIRS, PLACEMENTS, UNIFIED, UNIFIED_PAIRS, Placement

STEPS, FEWER = 20, 4

FLOAT, BRAIN = torch.float32, torch.bfloat16


EVERY = [(dtype, compute, ranks) for dtype in (FLOAT, BRAIN) for compute in ("fx", "inductor") for ranks in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compute", "ranks", "steps", "placements"),
    [
        pytest.param(FLOAT, "fx", 1, FEWER, PAIRS, id="fp32-fx-pairs"),
        pytest.param(
            BRAIN, "inductor", 2, FEWER, PLACEMENTS, marks=[pytest.mark.distributed, pytest.mark.thorough], id="bf16-inductor"
        ),
        *(pytest.param(*case, STEPS, PLACEMENTS, marks=pytest.mark.tiers, id="-".join(map(str, case))) for case in EVERY),
    ],
)
def test_the_bits_of_all_on_the_device(
    dtype: torch.dtype, compute: str, ranks: int, steps: int, placements: list[Placement], tmp_path: Path
) -> None:
    """Loss, parameters and states after some steps; bytes over each link at every step."""
    options = (str(tmp_path), dtype, compute, steps, (None,), 96, None, None, placements)
    assert run_ranks(train_everywhere, ranks, *options) == [len(placements)] * ranks


def test_in_the_pairs_each_two_kinds_of_states_meet_on_each_two_tiers() -> None:
    for pairs, every in ((PAIRS, PLACEMENTS), (UNIFIED_PAIRS, UNIFIED)):
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert {(p[one], p[other]) for p in pairs} == {(p[one], p[other]) for p in every}


@pytest.mark.slow
@pytest.mark.tiers
@pytest.mark.parametrize(
    ("dtype", "master", "reduced", "ranks"),
    [(FLOAT, None, None, 1), (BRAIN, "float32", None, 1), (BRAIN, "float32", None, 2), (FLOAT, None, BRAIN, 2)],
    ids=["fp32", "bf16", "bf16 on two ranks", "fp32 reduced in bf16"],
)
def test_wherever_parameters_are_updated(
    dtype: torch.dtype, master: str | None, reduced: torch.dtype | None, ranks: int, tmp_path: Path
) -> None:
    """Three chunks of two pieces: what is in memory is never read again."""
    counts = run_ranks(train_everywhere, ranks, str(tmp_path), dtype, "fx", 3, ("host", "device"), 8192, master, reduced)
    assert counts == [2 * len(PLACEMENTS)] * ranks


def test_the_bytes_of_gradients_in_fp32(tmp_path: Path) -> None:
    """A few of the placements, in this process; all of them above."""
    few = [("nvme", "nvme", "nvme"), ("host", "nvme", "host"), ("device", "host", "device")]
    options = (str(tmp_path), BRAIN, "fx", 2, (None, "device"), 96, "float32", None, few)
    assert train_everywhere(0, 1, *options) == 2 * len(few)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "placements"),
    [
        pytest.param(FLOAT, UNIFIED_PAIRS, id="fp32-pairs"),
        pytest.param(FLOAT, UNIFIED, marks=pytest.mark.tiers, id="fp32"),
        pytest.param(BRAIN, UNIFIED, marks=pytest.mark.thorough, id="bf16"),
    ],
)
def test_where_the_device_is_host_memory(dtype: torch.dtype, placements: list[Placement], tmp_path: Path) -> None:
    assert run_ranks(train_without_a_device, 2, str(tmp_path), dtype, "fx", 3, placements) == [len(placements)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_states_striped_over_two_folders(ranks: int, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for counts in run_ranks(train_in_folders, ranks, [str(folder) for folder in folders], 4):
        for written in counts:
            assert written.keys() == {str(folder) for folder in folders}
            assert min(written.values()) > 0.05 * sum(written.values()), "shares are what was measured of the drives"
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_each_rank_in_a_folder_of_its_own(pair: bool, tmp_path: Path) -> None:
    for name in ("rank0", "rank1", "second0", "second1"):
        (tmp_path / name).mkdir()
    names = ["rank{local_rank}", "second{local_rank}"][: 1 + pair]
    nvme = [str(tmp_path / name) for name in names]
    for rank, counts in enumerate(run_ranks(train_in_folders, 2, nvme if pair else nvme[0], 4)):
        for written in counts:
            assert written.keys() == {path.replace("{local_rank}", str(rank)) for path in nvme}
