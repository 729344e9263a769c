"""Where states live changes no bit, and moves the bytes it must and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marks import more
from rank_tiers import train_everywhere, train_in_folders, train_without_a_device
from ranks import run_ranks
from tiers import PLACEMENTS

STEPS, FEWER = 20, 4

FLOAT, BRAIN = torch.float32, torch.bfloat16


EVERY = [(dtype, compute, ranks) for dtype in (FLOAT, BRAIN) for compute in ("fx", "inductor") for ranks in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compute", "ranks", "steps"),
    [
        pytest.param(FLOAT, "fx", 1, FEWER),
        pytest.param(BRAIN, "inductor", 2, FEWER, marks=[pytest.mark.distributed, pytest.mark.thorough]),
        *(pytest.param(*case, STEPS, marks=pytest.mark.tiers) for case in EVERY),
    ],
    ids=str,
)
def test_the_bits_of_all_on_the_device(dtype: torch.dtype, compute: str, ranks: int, steps: int, tmp_path: Path) -> None:
    """Loss, parameters and states after some steps; bytes over each link at every step."""
    assert run_ranks(train_everywhere, ranks, str(tmp_path), dtype, compute, steps) == [len(PLACEMENTS)] * ranks


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
@pytest.mark.parametrize("dtype", [FLOAT, more(BRAIN)], ids=["fp32", "bf16"])
def test_where_the_device_is_host_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    assert run_ranks(train_without_a_device, 2, str(tmp_path), dtype, "fx", 3) == [8, 8]


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
