"""Errors of drives keep what they say: errno and folder through Dynamo, and what to do about a write that was lost."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing, store_of
from models import Mlp, vectors
from tiers import context_of
from torch import nn
from training import adamw

import zinf_compile
from zinf_compile.backend.through_dynamo import raise_through_dynamo
from zinf_compile.errors import StepFailedError, StoreError
from zinf_compile.runtime.storage import scratch_file

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def on_drive(folder: Path, **options: Any) -> nn.Module:
    model = Mlp()
    model.compile(backend="zero_infinity", options={"params": "nvme", "nvme": str(folder), "compute": "fx", **options})
    return model


def test_errno_and_folder_pass_through_the_first_compiled_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "fallocate", lambda *_: errno.EDQUOT)
    with pytest.raises(StoreError, match=r"^\[Errno 122\] cannot reserve space in .*the disk quota is used up") as raised:
        on_drive(tmp_path)(*vectors(0))
    assert (raised.value.errno, raised.value.filename) == (errno.EDQUOT, str(tmp_path))


def test_what_passes_through_dynamo_is_what_it_was() -> None:
    error = StoreError(errno.EIO, "cannot read", "/mnt/a")
    error.add_note("on rank 3")
    passed = raise_through_dynamo(error)
    assert isinstance(passed, StoreError)
    assert (passed.errno, passed.strerror, passed.filename, passed.filename2) == (errno.EIO, "cannot read", "/mnt/a", None)
    assert (passed.args, str(passed), passed.__notes__) == (error.args, str(error), ["on rank 3"])
    assert str(raise_through_dynamo(StoreError("only words"))) == "only words"
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.filename, str(again)) == (errno.EIO, "/mnt/a", str(error))
    assert str(raise_through_dynamo(zinf_compile.errors.OptionError("option x"))) == "option x"


def lose_a_write(store: Any, before: bytes) -> None:
    """Let the first block hold what it held before its last write."""
    fd = os.open(f"/proc/self/fd/{store.files[0].fd}", os.O_RDWR)
    try:
        os.pwrite(fd, before, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("way", ["an error", "silently"])
def test_a_lost_write_that_a_forward_finds_says_to_load_a_checkpoint(way: str, tmp_path: Path) -> None:
    model = on_drive(tmp_path)
    optimizer = adamw(model.parameters())
    model(*vectors(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = copy.deepcopy(zinf_compile.full_state_dict(model)), copy.deepcopy(zinf_compile.full_optimizer_state_dict(optimizer))
    expected = model(*vectors(1)).detach().clone()
    model(*vectors(1)).backward()
    store = store_of("parameter", model)
    fd = os.open(f"/proc/self/fd/{store.files[0].fd}", os.O_RDONLY)
    before = os.pread(fd, 4096, 0)
    os.close(fd)
    refusals = []
    try:
        if way == "an error":
            with failing(context_of(model).engine, "write", 0):
                optimizer.step()
                model(*vectors(1))
        else:
            optimizer.step()
            store_of("parameter", model)
            lose_a_write(store, before)
    except (StoreError, StepFailedError) as error:
        refusals.append(error)
    if not refusals:
        with pytest.raises((StoreError, StepFailedError)) as raised:
            model(*vectors(1))
        refusals.append(raised.value)
    (refusal,) = refusals
    assert "oad a checkpoint of model and optimizer" in str(refusal)
    assert "parameter " in str(refusal)
    if isinstance(refusal, StoreError):
        assert refusal.filename == str(tmp_path)
    optimizer.zero_grad()
    zinf_compile.load_full_state_dict(model, kept[0])
    zinf_compile.load_full_optimizer_state_dict(optimizer, kept[1])
    assert torch.equal(model(*vectors(1)), expected), "and so it goes on"
