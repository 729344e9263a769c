"""Notes of a rank's error: they count until another exchange has ended."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from zinf_compile.runtime.comm import error_notes
from zinf_compile.runtime.comm.error_notes import ErrorNotes


def test_a_note_counts_until_that_rank_goes_on() -> None:
    with patch.object(error_notes, "store_of", return_value=dist.HashStore()):
        mine, other = (ErrorNotes(Mock(), rank=rank, size=3) for rank in (0, 2))
        mine.exchanges = other.exchanges = 5
        assert not mine.read()
        other.leave(ValueError("long " * 1000))
        assert mine.read().startswith("rank 2 stopped with ValueError: long long")
        assert len(mine.read()) < 2000
        assert not other.read(), "one's own says nothing"
        other.exchanges = mine.exchanges = 6
        assert not mine.read(), "the error was caught"


@pytest.mark.parametrize(
    "store", [None, Mock(check=Mock(side_effect=dist.DistNetworkError), set=Mock(side_effect=dist.DistNetworkError))]
)
def test_without_a_store_nobody_is_told(store: object) -> None:
    """It is destroyed, or was where a rank has ended."""
    with patch.object(error_notes, "store_of", return_value=store):
        notes = ErrorNotes(Mock(), rank=0, size=2)
        notes.leave(ValueError())
        assert not notes.read()
