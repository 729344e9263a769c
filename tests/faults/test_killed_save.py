"""A save that is killed, fails or meets another one leaves all old files or all new ones, whoever loads them."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from killed_saves import counting, entries, killed_at
from programs import Program
from safetensors.torch import load_file
from torch import nn
from transformer_models import LLAMA

import zinf_compile
from zinf_compile.checkpoint import folder_update
from zinf_compile.checkpoint.safetensors_index import INDEX, SINGLE
from zinf_compile.checkpoint.safetensors_reader import TensorFiles

MANY, ONE = 40, "1GiB"
"""Bytes of a file: each tensor in one of its own, or all in one."""


def model(value: float) -> nn.Module:
    built = nn.Linear(3, 4)
    for number, parameter in enumerate(built.parameters()):
        nn.init.constant_(parameter, value + number / 8)
    return built


OLD, NEW = model(1.0), model(2.0)


def as_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """Load what counts for transformers: a single file, or else what the index names, all tensors of these files."""
    if (folder / SINGLE).is_file():
        return load_file(folder / SINGLE)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(names.values())):
        found |= load_file(folder / file)
    assert found.keys() == names.keys()
    return found


def as_here(folder: Path) -> dict[str, torch.Tensor]:
    files = TensorFiles(folder)
    found = {}
    for name, stored in files.tensors.items():
        assert isinstance(stored.dtype, torch.dtype)
        flat = torch.empty(torch.Size(stored.shape).numel(), dtype=stored.dtype)
        files.read(name, flat)
        found[name] = flat.view(stored.shape)
    files.close()
    return found


def whose(folder: Path) -> nn.Module:
    """Return the model that is saved in a folder, whole, whichever way it is loaded."""
    found = []
    for state in (as_transformers(folder), as_here(folder)):
        for saved in (OLD, NEW):
            expected = saved.state_dict()
            if state.keys() == expected.keys() and all(torch.equal(state[name], value) for name, value in expected.items()):
                found.append(saved)
    assert len(found) == 2, "all old or all new"
    assert found[0] is found[1]
    return found[0]


def drafts(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("before", "after"), [(MANY, MANY), (MANY, ONE), (ONE, MANY), (ONE, ONE)])
def test_killed_at_each_system_call(before: Any, after: Any, tmp_path: Path) -> None:
    seen: list[nn.Module] = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        zinf_compile.save_safetensors(OLD, folder, file_bytes=before)
        killed = killed_at(number, functools.partial(zinf_compile.save_safetensors, NEW, folder, file_bytes=after))
        seen.append(whose(folder))
        if (killed and number % 5 == 0) or not killed:
            names = zinf_compile.save_safetensors(OLD, folder, file_bytes=before)  # which removes what the dead one left
            assert sorted(path.name for path in folder.iterdir()) == sorted([*names, *([INDEX] if before == MANY else [])])
            assert whose(folder) is OLD
        shutil.rmtree(folder)
        if not killed:
            break
    assert len(seen) > 10
    assert seen[0] is OLD
    assert seen[-1] is NEW
    turn = seen.index(NEW)
    assert seen == [OLD] * turn + [NEW] * (len(seen) - turn)


@pytest.mark.parametrize(("before", "after"), [(MANY, MANY), (ONE, MANY), (MANY, ONE)])
def test_each_call_that_fails_names_its_path_and_leaves_one_or_the_other(before: Any, after: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for number in itertools.count():
        zinf_compile.save_safetensors(OLD, folder, file_bytes=before)
        there = entries(folder)
        failure = Failure(number)
        error: OSError | None = None
        try:
            with counting(failure):
                zinf_compile.save_safetensors(NEW, folder, file_bytes=after)
        except OSError as raised:
            error = raised
        if error is None:
            assert whose(folder) is NEW
        else:
            assert failure.failed
            assert (error.errno, str(folder) in str(error.filename)) == (errno.ENOSPC, True)
            assert ("as before" in str(error)) == (whose(folder) is OLD)
            if whose(folder) is OLD:
                assert {name: content for name, content in entries(folder).items() if name[0] != "."} == there
        if failure.reached < number:
            break


class Failure:
    """A full drive at the system call of some number."""

    def __init__(self, number: int) -> None:
        self.number, self.reached, self.failed = number, 0, False

    def __call__(self, at: int, name: str, args: tuple[Any, ...]) -> None:
        self.reached = at
        if at == self.number and name != "close":
            self.failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), args[0] if isinstance(args[0], Path) else None)


def test_what_is_renamed_has_reached_the_drive_and_old_files_go_after_that(tmp_path: Path) -> None:
    zinf_compile.save_safetensors(OLD, tmp_path, file_bytes=MANY)
    old = {path.name for path in tmp_path.iterdir()} - {INDEX}
    synced: set[str] = set()
    dirty: set[str] = set()
    trace: list[str] = []

    def follow(_: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync":
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            synced.add(path)
            if path == str(tmp_path):
                dirty.clear()
        elif name == "rename":
            source, target = (str(arg) for arg in args)
            assert source in synced, "a file's bytes come before its name"
            if Path(target).name == INDEX:
                assert not dirty, "the files that an index names have their names before it"
            dirty.add(target)
            trace.append(Path(target).name)
        elif name == "unlink" and Path(args[0]).name in old:
            assert INDEX in trace
            assert not dirty, "nothing old goes before the new index is on the drive"
            old.discard(Path(args[0]).name)

    with counting(follow):
        zinf_compile.save_safetensors(NEW, tmp_path, file_bytes=MANY)
    assert trace[-1] == INDEX
    assert not old


def test_transformers_loads_it_wherever_the_save_was_killed(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**{**LLAMA, "num_hidden_layers": 1})
    torch.manual_seed(0)
    old, new = hf.LlamaForCausalLM(config), hf.LlamaForCausalLM(config)
    states = [{name: value.clone() for name, value in each.state_dict().items()} for each in (old, new)]
    shapes: set[tuple[str, ...]] = set()
    outcomes = []
    for before, after in (("1GiB", "16KiB"), ("16KiB", "16KiB")):

        def save(folder: Path, after: str = after) -> None:
            zinf_compile.save_safetensors(new, folder, file_bytes=after)

        for number in itertools.count(1, 3):
            folder = tmp_path / f"{before}{number}"
            zinf_compile.save_safetensors(old, folder, file_bytes=before)
            config.save_pretrained(folder)
            there = set(entries(folder))
            killed = killed_at(
                number, lambda folder=folder, after=after: zinf_compile.save_safetensors(new, folder, file_bytes=after)
            )  # type: ignore[misc]
            now = entries(folder)
            shape = (before, str(len(now)), str(len(there & now.keys())), str(SINGLE in now), str(drafts(folder) != []))
            if shape not in shapes:  # what a loader could find different
                shapes.add(shape)
                state = hf.LlamaForCausalLM.from_pretrained(folder).state_dict()
                same = [all(torch.equal(state[name], value) for name, value in each.items()) for each in states]
                assert sum(same) == 1
                outcomes.append(same[1])
            shutil.rmtree(folder)
            if not killed:
                break
    assert {False, True} == set(outcomes)


def test_names_differ_from_save_to_save_and_transformers_knows_them(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**{**LLAMA, "num_hidden_layers": 1})
    built = hf.LlamaForCausalLM(config)
    first = zinf_compile.save_safetensors(built, tmp_path, file_bytes="8KiB")
    second = zinf_compile.save_safetensors(built, tmp_path, file_bytes="8KiB")
    assert not set(first) & set(second)
    assert sorted(second) == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    built.save_pretrained(tmp_path, max_shard_size="16KB")
    assert not set(second) & {path.name for path in tmp_path.iterdir()}, "they are removed as files of an earlier save"
    zinf_compile.save_safetensors(built, tmp_path, file_bytes="8KiB")
    assert not list(tmp_path.glob("model-?????-of-*")), "those of transformers are gone, too"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_all_files_have_the_mode_that_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        for size in (MANY, ONE):
            zinf_compile.save_safetensors(NEW, tmp_path / str(size), file_bytes=size)
            modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / str(size)).iterdir()}
            assert modes == {0o666 & ~mask}
    finally:
        os.umask(before)


def test_what_stands_in_the_way_is_never_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_update.secrets, "token_hex", lambda size: "0" * 2 * size)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / SINGLE).symlink_to(victim)
    zinf_compile.save_safetensors(NEW, folder)
    assert not (folder / SINGLE).is_symlink()
    trap = folder / ".model-0000000000000000.partial"
    trap.symlink_to(tmp_path)
    with pytest.raises(OSError, match="File exists; the folder is as before"):
        zinf_compile.save_safetensors(OLD, folder)
    assert victim.read_bytes() == b"precious"
    assert whose(folder) is NEW


@pytest.fixture
def living(tmp_path: Path) -> Iterator[str]:
    """The drafts of a process that lives, and saves to the same folder."""
    script = (
        "import sys, pathlib; from zinf_compile.checkpoint.folder_update import FolderUpdate\n"
        "update = FolderUpdate(pathlib.Path(sys.argv[1])); update.begin(); print(update._staging.name, flush=True); input()"
    )
    with Program(script, str(tmp_path)) as other:
        yield other.stdout.readline().strip()


def test_drafts_of_the_living_stay_and_those_of_the_dead_go(living: str, tmp_path: Path) -> None:
    killed_at(13, lambda: zinf_compile.save_safetensors(OLD, tmp_path, file_bytes=MANY))
    assert len(drafts(tmp_path)) == 2
    zinf_compile.save_safetensors(NEW, tmp_path, file_bytes=MANY)
    assert drafts(tmp_path) == [living]


def test_a_folder_of_another_jobs_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That job holds the lock until it ends: a line in the log while it is waited for, then an error that says whose it is."""
    monkeypatch.setattr(folder_update, "_LOCK_SILENT_S", 0.0)
    monkeypatch.setattr(folder_update, "_LOCK_TIMEOUT_S", 0.1)
    script = (
        "import sys, torch, zinf_compile\n"
        "zinf_compile.save(sys.argv[1], torch.nn.Linear(3, 4)); print('saved', flush=True); input()"
    )
    with Program(script, str(tmp_path)) as other:
        assert other.stdout.readline() == "saved\n"
        held = rf"another process has locked {tmp_path}, as long as it writes a model there or, .*, until it ends"
        with pytest.raises(
            OSError, match=rf"cannot save the model: .*{held}\. End that job, or save to another.*as before"
        ) as raised:
            zinf_compile.save_safetensors(NEW, tmp_path)
        assert (raised.value.errno, raised.value.filename) == (errno.ETIMEDOUT, str(tmp_path))
        (line,) = [record.getMessage() for record in caplog.records]
        assert re.search(rf"save_safetensors waits, 0\.1 s at most, for a lock: {held}", line)
        assert [path.name for path in tmp_path.iterdir()] == ["save-00000001"]
    zinf_compile.save_safetensors(NEW, tmp_path)
    assert whose(tmp_path) is NEW


def test_two_may_save_to_one_folder_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def save(saved: nn.Module, size: Any) -> None:
        try:
            for _ in range(15):
                zinf_compile.save_safetensors(saved, tmp_path, file_bytes=size)
        except BaseException as error:
            failures.append(error)

    for sizes in ((MANY, MANY), (MANY, ONE)):
        threads = [threading.Thread(target=save, args=args) for args in zip((OLD, NEW), sizes, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        whose(tmp_path)
        assert not drafts(tmp_path)


def test_a_full_drive_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no drive here that is always full")
    zinf_compile.save_safetensors(OLD, tmp_path)
    really = os.write

    def write(fd: int, data: Any) -> int:
        target = os.open(full, os.O_WRONLY)
        try:
            return really(target, data)
        finally:
            os.close(target)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left on device") as raised:
        zinf_compile.save_safetensors(NEW, tmp_path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / SINGLE))
    assert "cannot save the model" in str(raised.value)
    assert whose(tmp_path) is OLD
    assert not drafts(tmp_path)
