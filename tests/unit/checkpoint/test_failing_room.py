"""A save whose files find no space, while others wait for room before they change what it saves."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from zinf_compile.checkpoint.background import BackgroundSave, wait_for_save
from zinf_compile.checkpoint.saved_pieces import SavedPieces, memory_pieces
from zinf_compile.errors import CheckpointError


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), CheckpointError("another rank has no space")])
def test_who_waits_for_room_goes_on_when_there_is_none(error: Exception, tmp_path: Path) -> None:
    value, put = torch.arange(8.0), list[str]()
    pieces = SavedPieces(memory_pieces("states", "value", "value", value), lambda key, *_: put.append(key), has_room=False)
    is_waited_for = threading.Event()

    def allocate() -> None:
        assert is_waited_for.wait(60)
        raise error

    save = BackgroundSave(
        tmp_path,
        None,
        [],
        pieces=pieces,
        watched=[],
        allocate=allocate,
        finish=lambda: None,
        commit=None,
        close=lambda: None,
        ended=lambda: None,
        name="save",
    )
    save.start()
    changing = threading.Thread(target=pieces.before_change, args=("states", 0, 8), daemon=True)
    changing.start()
    changing.join(0.05)
    assert changing.is_alive()
    is_waited_for.set()
    changing.join(60)
    assert not changing.is_alive()
    assert not put
    with pytest.raises(type(error)):
        wait_for_save()
