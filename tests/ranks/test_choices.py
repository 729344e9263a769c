"""What ranks decide once for each parameter, from figures that they exchange: lookups, and losses in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from irtext import example_of, graph_of, lines_of, text_of, unit
from marks import more
from rank_choices import ROWS, chunk_losses, look_rows_up, recompile_within_a_cap
from ranks import run_ranks
from torch import nn
from training import assert_same

import zinf_compile
from zinf_compile.cli.trace import trace
from zinf_compile.errors import StoreWarning
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.row_rounds import ROUND_BYTES, rounds_of_rows, rows_on_their_way
from zinf_compile.passes.schedule.insert_row_lookups import insert_row_lookups

W, X = unit(8, 2), torch.empty(3, 2)
INDICES = torch.zeros(3, dtype=torch.int64)


def test_docstring_example() -> None:
    gm = graph_of("y = embedding(w, i)\nreturn (y,)\n", w=W, i=INDICES)
    before, after = example_of(insert_row_lookups)
    assert (before, after) == (lines_of("y = embedding(w, i)"), lines_of("y = gather_rows(w, i)"))
    assert "gather_rows(w, i)" in text_of(insert_row_lookups(gm, chosen=lambda slot: True))


@pytest.mark.parametrize(
    "text",
    [
        "y = embedding(w, i)\nz = mm(y, t)\nt = t(w)\n",
        "y = embedding(w, i)\na = mul(w, 2)\n",
        "y = embedding(w, i, -1, True)\n",
    ],
)
def test_a_parameter_that_is_read_whole_too_is_gathered_whole(text: str) -> None:
    lines = [line for line in text.splitlines() if not line.startswith("z")]
    gm = graph_of("\n".join(lines) + "\nreturn (y,)\n", w=W, i=INDICES)
    assert "gather_rows" not in text_of(insert_row_lookups(gm, chosen=lambda slot: True))


def test_a_table_that_is_not_cut_moves_in_rounds_of_bounded_size() -> None:
    rows = 3 * ROUND_BYTES // 256
    rounds = rounds_of_rows((rows, 64), (64, 1), ())
    assert [part.first for part in rounds] == [0, *(part.last for part in rounds[:-1])]
    assert len(rounds) == 3
    slot = ParameterSlot(
        index=0,
        name="w",
        shape=(rows, 64),
        stride=(64, 1),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=True,
    )
    assert rows_on_their_way(slot) <= 3 * ROUND_BYTES + (8 << 20)


@pytest.mark.distributed
@pytest.mark.parametrize("away", [{}, more({"params": "nvme"})], ids=["device", "nvme"])
def test_rows_are_looked_up_on_all_ranks_where_that_is_cheaper_on_the_one_with_most(away: dict[str, str], tmp_path: Path) -> None:
    found: list[dict[str, Any]] = run_ranks(look_rows_up, 2, {**away, **({"nvme": str(tmp_path)} if away else {})})
    expected = {"words.weight": True, "few.weight": False, "tied.weight": None}
    assert [one["chosen"] for one in found] == [expected, expected] or away


@pytest.mark.distributed
@pytest.mark.parametrize("compute", ["fx", more("inductor")])
def test_losses_are_taken_in_chunks_on_all_ranks_alike(compute: str) -> None:
    for noted in run_ranks(chunk_losses, 2, compute):
        assert set(noted["large on one"]) == {True}
        assert set(noted["small"]) == {False}
        assert set(noted["asked for"]) == {True}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x).square()


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_few_rows_come_from_a_drive_by_themselves_and_many_with_the_whole(tmp_path: Path) -> None:
    """Of 24 MB: one row takes a block of 4 MiB, rows of all blocks take them all. The first graph decides."""
    for first, then, rows in (([7, 7], [[5], list(range(0, ROWS, 100))], True), (range(0, ROWS, 10), [[7]], False)):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Words()
        weight = model.words.weight.detach().clone()
        model.compile(backend="zero_infinity", options={"compute": "fx", "params": "nvme", "nvme": tmp_path})
        for indices in (list(first), *then):
            with torch.no_grad():
                found = model(torch.tensor(indices))
            assert_same(str(len(indices)), weight[indices].square(), found)
        read = zinf_compile.stats(model)["links"]["nvme to host"]["bytes"]
        whole = weight.nbytes
        assert (read < 1.5 * whole) if rows else (read >= 2 * whole)
    assert issubclass(StoreWarning, UserWarning)


def test_one_rank_with_all_in_memory_moves_nothing_and_the_dump_shows_lookups_on_several() -> None:
    def target() -> Any:
        return Words(), torch.zeros(16, dtype=torch.int64)

    for world_size, shown in ((1, False), (2, True)):
        for graph in trace(target, world_size=world_size):
            if graph.kind != "backward":
                assert ("gather_rows(words.weight" in graph.text) == shown


@pytest.mark.distributed
def test_a_rank_that_compiles_again_alone_within_the_least_memory() -> None:
    """It goes by the decision of all; where it is short of memory by then it says so, and the others don't wait for ever."""
    (found, short), (_, other) = run_ranks(recompile_within_a_cap, 2)
    assert found["chosen"] == {"words.weight": True, "few.weight": False, "tied.weight": None}, found
    assert short.startswith("BudgetError: the model needs "), short
    assert other.startswith("RankMismatchError: rank 1 of 2 got no answer from another rank while starting the forward"), other
