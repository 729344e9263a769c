"""Threads of one process that save at once take turns. The models are whole, nothing is compiled."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.checkpoint import save as saving
from zinf_compile.checkpoint.background import one_at_a_time
from zinf_compile.checkpoint.rank_files import RankFiles


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Call functions in a thread each, all at once; return what each has returned or raised."""
    found: list[Any] = [None] * len(acts)
    ready = threading.Barrier(len(acts))

    def run(number: int) -> None:
        try:
            ready.wait(60)
            found[number] = acts[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each save take a while in its middle."""
    check = saving.check_space

    def checked(*args: Any) -> None:
        time.sleep(0.1)
        check(*args)

    monkeypatch.setattr(saving, "check_space", checked)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("wait", [True, False])
def test_to_one_folder(wait: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    acts = [lambda n=n: zinf_compile.save(tmp_path, model, optimizer, extra={"n": n}, keep=9, wait=wait) for n in range(3)]
    saved = at_once(*acts, zinf_compile.wait_for_save)[:3]
    zinf_compile.wait_for_save()
    assert sorted(saved) == [tmp_path / f"save-{number:08}" for number in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == sorted(saved)
    for n, path in enumerate(saved):
        assert zinf_compile.load(path, model, optimizer) == {"n": n}


@pytest.mark.usefixtures("slow")
def test_each_has_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = RankFiles.finish

    def finished(files: RankFiles) -> None:
        finish(files)
        if "broken" in str(files._folder):
            raise OSError(5, "a drive that fails")

    monkeypatch.setattr(RankFiles, "finish", finished)
    names = ["good", "broken", "other"]
    found = at_once(*(lambda name=name: zinf_compile.save(tmp_path / name, nn.Linear(3, 4), wait=True) for name in names))
    assert [found[0], found[2]] == [tmp_path / name / "save-00000001" for name in ("good", "other")]
    assert isinstance(found[1], OSError)
    assert "a drive that fails" in str(found[1])


def test_a_save_inside_of_a_save(tmp_path: Path) -> None:
    """As of a signal's handler: the same thread doesn't wait for itself."""

    class Saving(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return zinf_compile.save(tmp_path / "inner", nn.Linear(3, 4), wait=True).name

        def __iter__(self) -> Any:
            return iter(["name"])

        def __len__(self) -> int:
            return 1

    (saved,) = at_once(lambda: zinf_compile.save(tmp_path / "outer", nn.Linear(3, 4), extra={"x": Saving()}, wait=True))
    assert zinf_compile.load(saved, nn.Linear(3, 4)) == {"x": {"name": "save-00000001"}}
    assert (tmp_path / "inner" / "save-00000001").is_dir()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with one_at_a_time():
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        child = os.fork()
        if not child:
            threading.Timer(20, os._exit, [1]).start()
            zinf_compile.wait_for_save()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.set()
        thread.join()
