"""Checkpoints that don't fit or are damaged, and folders that can't be saved to, as functions that tests start on ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from damaged_saves import damage_a_state
from edited_manifests import edit
from named_cap import named_cap
from rank_checkpoint import build, full, train
from rank_load import placed
from same_leaves import assert_equal
from small_drives import fill
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint import reserved_space
from zinf_compile.errors import BudgetError

Damage = Callable[[Path], object]


def outcome(act: Callable[[], object]) -> str:
    """Return class and message of what `act` raises."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def barrier() -> None:
    """Wait for the other ranks, where there are any."""
    if dist.get_world_size() > 1:
        dist.barrier()


def largest_of(folder: Path) -> Path:
    """Return the largest file of tensors."""
    return max(folder.glob("rank-*.safetensors"), key=lambda path: path.stat().st_size)


def truncated(folder: Path) -> None:
    path = largest_of(folder)
    os.truncate(path, path.stat().st_size - 5)


def swapped(folder: Path) -> None:
    """Put the file of another save in the place of this one's."""
    other = folder.parent.parent / "other"
    shutil.copy(next(other.glob("save-*")) / largest_of(folder).name, folder)


def edited(folder: Path) -> None:
    path = folder / "rank-00000.json"
    path.write_text(path.read_text().replace('"begin":', '"begin": ', 1))


def _renamed(folder: Path, name: str) -> None:
    """Let the manifest of rank 0 name another file, and the whole manifest have its checksum."""
    edit(folder / "rank-00000.json", lambda content: content.update({name: content.pop(next(iter(content)))}))


def outside(folder: Path) -> None:
    _renamed(folder, f"../{folder.name}/{largest_of(folder).name}")


def linked(folder: Path) -> None:
    path = largest_of(folder)
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


DAMAGES: dict[str, Damage] = {
    "truncated": truncated,
    "a bit": damage_a_state,
    "swapped": swapped,
    "edited": edited,
    "outside": outside,
    "a link": linked,
    "missing": lambda folder: largest_of(folder).unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


class Wider(nn.Module):
    """The same, wider, of another type, without a buffer, and with a parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.down = nn.Embedding(61, 41), nn.Linear(41, 13)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.more = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.down(self.words(tokens)) * self.scale).square().mean() + self.more.square().sum()


def loads(rank: int, size: int, folder: str, options: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Load what can't be loaded; return by case the error, and whether the model is as before, or refused until a load."""
    torch.compiler.reset()
    options = placed(options, size)
    compiled, model, optimizer = build(options)
    train(compiled, optimizer, range(1))
    zinf_compile.save(f"{folder}/other", model, optimizer, wait=True)
    train(compiled, optimizer, range(1, 2))
    saved = zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    train(compiled, optimizer, range(2, 3))
    before, found = full(model, optimizer), dict[str, tuple[str, str]]()

    def state() -> str:
        refusal = outcome(lambda: compiled(torch.zeros(2, 8, dtype=torch.long)))
        if refusal:
            assert refusal.startswith("StepFailedError"), refusal
            assert outcome(optimizer.step).startswith("StepFailedError")
            zinf_compile.load(good, model, optimizer)
            assert_equal(full(model, optimizer), before)
            return "refused"
        assert_equal(full(model, optimizer), before)
        return "as before"

    good = zinf_compile.save(f"{folder}/good", model, optimizer, wait=True)
    for name, damage in DAMAGES.items():
        copy = Path(folder) / f"copy-{name.replace(' ', '-')}" / saved.name
        if rank == 0:
            shutil.copytree(saved, copy)
            damage(copy)
        barrier()
        found[name] = outcome(lambda copy=copy: zinf_compile.load(copy, model, optimizer)), state()  # type: ignore[misc]

    others = Wider()
    its = torch.optim.AdamW(others.parameters(), lr=0.01, fused=True)
    other = torch.compile(others, backend=BACKEND, options=options)
    train(other, its, range(1))
    theirs = full(others, its)
    found["another model"] = outcome(lambda: zinf_compile.load(saved, others, its)), state()
    assert_equal(full(others, its), theirs)
    train(other, its, range(1))

    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=0.01)
    found["another class"] = outcome(lambda: zinf_compile.load(saved, model, sgd)), state()
    groups = [dict(group) for group in optimizer.param_groups]
    fewer = torch.optim.AdamW([{"params": groups[0]["params"][1:]}, {"params": groups[1]["params"]}], lr=0.01)
    found["fewer parameters"] = outcome(lambda: zinf_compile.load(saved, model, fewer)), state()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    more = torch.optim.AdamW([{"params": [*groups[0]["params"], *frozen]}, {"params": groups[1]["params"]}], lr=0.01)
    found["more parameters"] = outcome(lambda: zinf_compile.load(saved, model, more)), state()
    two = [optimizer, torch.optim.AdamW([nn.Parameter(torch.ones(1))])]
    found["more optimizers"] = outcome(lambda: zinf_compile.load(saved, model, two)), state()
    found["nothing there"] = outcome(lambda: zinf_compile.load(f"{folder}/none", model, optimizer)), state()
    zinf_compile.load(saved, model, optimizer)
    train(compiled, optimizer, range(2, 3))
    assert_equal(full(model, optimizer)[0], before[0])
    return found


HOLDER = """
import sys, torch, zinf_compile
zinf_compile.save(sys.argv[1], torch.nn.Linear(3, 4))
print("saved", flush=True)
input()
"""


@contextlib.contextmanager
def _another_job(folder: Path) -> Iterator[None]:
    """Context with another process that saves to a folder."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        yield
        process.kill()


def saves(rank: int, size: int, drives: dict[str, str], options: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Save where it can't be; return the errors by case, and what is left in the folder of the last save that went well.

    `drives`: "small", of 4 MiB, "read-only", and "ordinary".
    """
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    losses = train(compiled, optimizer, range(2))
    small, ordinary = Path(drives["small"]), Path(drives["ordinary"])
    found: dict[str, str] = {}

    def save(folder: Path) -> None:
        zinf_compile.save(folder, model, optimizer, wait=True)

    first = rank == 0
    save(small / "saves")
    if first:
        fill(small, leave=4096)
    barrier()
    found["full drive"] = outcome(lambda: save(small / "saves"))
    over = mock.patch.object(reserved_space, "fallocate", return_value=errno.EDQUOT)
    with over if rank == size - 1 else contextlib.nullcontext():
        found["quota"] = outcome(lambda: save(ordinary / "saves"))
    found["read-only"] = outcome(lambda: save(Path(drives["read-only"]) / "saves"))
    if first:
        (ordinary / "file").write_bytes(b"precious")
    barrier()
    found["a file"] = outcome(lambda: save(ordinary / "file"))
    with _another_job(ordinary / "theirs") if first else contextlib.nullcontext():
        barrier()
        found["another job"] = outcome(lambda: save(ordinary / "theirs"))
        barrier()
    left = sorted(os.listdir(small / "saves")), sorted(os.listdir(ordinary / "saves")), sorted(os.listdir(ordinary / "theirs"))
    assert left == (["save-00000001"], [], ["save-00000001"])
    losses += train(compiled, optimizer, range(2, 4))
    save(ordinary / "saves")
    zinf_compile.load(small / "saves", model, optimizer)
    assert train(compiled, optimizer, range(2, 4)) == losses[2:], "an error costs nothing, and the last checkpoint stands"
    return found, sorted(os.listdir(ordinary / "saves"))


def two_jobs(rank: int, size: int, folder: str) -> tuple[str, list[str]]:
    """Let the first half of the ranks and the others, as two jobs, save to one folder again and again; return the error."""
    half = size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))]
    torch.compiler.reset()
    options = {"process_group": groups[rank >= half], "timeout_s": 60}
    compiled, model, optimizer = build(options)
    train(compiled, optimizer, range(1))
    dist.barrier()
    error = outcome(lambda: [zinf_compile.save(folder, model, optimizer, keep=3, wait=True) for _ in range(3)])
    dist.barrier()
    names = sorted(os.listdir(folder))
    before = zinf_compile.full_state_dict(model)
    assert zinf_compile.load(folder, model, optimizer) == {}
    after = zinf_compile.full_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "both jobs have the same values"
    return error, names


class Stack(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(200, 151, bias=False), nn.Linear(151, 250, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Heavy(torch.optim.Optimizer):
    """Keeps more states than a first call counts."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                for number in range(9):
                    state = self.state[p].setdefault(f"mean {number}", torch.zeros_like(p))
                    state.mul_(0.5).add_(p.grad)
                    p.add_(state, alpha=-0.01)


def under_a_cap(rank: int, size: int, folder: str, cap: int) -> list[tuple[str, int]]:
    """Load under a cap on memory, and under each one that is named as the smallest; return what was refused, and the caps."""
    group = placed({"compute_shape": {"piece_numel": 1 << 12}, "timeout_s": 60}, size)

    def build_stack(options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
        zinf_compile.reset()  # of what earlier models have reserved
        torch.manual_seed(0)
        model = Stack()
        model.compile(backend=BACKEND, options={**group, **options})
        return model, Heavy(model.parameters(), {})

    def call(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build_stack({})
    call(model, optimizer)
    saved = zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    refused: list[tuple[str, int]] = []
    while len(refused) < 5:
        model, optimizer = build_stack({"device_memory": cap})
        where = "call"
        try:
            with torch.no_grad():
                model(torch.ones(2, 200))
            before = zinf_compile.full_state_dict(model)
            where = "load"
            zinf_compile.load(saved, model, optimizer)
            where = "training"
            call(model, optimizer)
        except BudgetError as error:
            if where == "load":
                assert_equal(zinf_compile.full_state_dict(model), before)
            cap = named_cap(error)
            refused.append((where, cap))
        else:
            break
    return refused


def replicas(rank: int, size: int, folder: str) -> tuple[str, list[str]]:
    """Save a plain model from all ranks to one folder, as DDP has it, then from the first alone; return the error."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    error = outcome(lambda: zinf_compile.save(f"{folder}/all", model, optimizer, wait=True))
    dist.barrier()
    zinf_compile.load(f"{folder}/all", model, optimizer)
    if rank == 0:
        for _ in range(2):
            zinf_compile.save(f"{folder}/first", model, optimizer, wait=True)
    zinf_compile.save(f"{folder}/own-{rank}", model, optimizer, wait=True)
    dist.barrier()
    return error, sorted(os.listdir(f"{folder}/all"))


def partitioned_in_extra(rank: int, size: int, folder: str, options: dict[str, Any]) -> dict[str, str]:
    """Save averages as plain values; return the errors. As a part of the model they are saved."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    train(compiled, optimizer, range(1))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    halves = {"half": model.words.weight.detach() * 0.5} if size > 1 or "params" in options else {}
    found = {
        "parameters": outcome(lambda: zinf_compile.save(folder, model, optimizer, extra=dict(averaged.named_parameters()))),
        "state_dict": outcome(lambda: zinf_compile.save(folder, model, optimizer, extra={"ema": averaged.state_dict()})),
        "tensor": outcome(lambda: zinf_compile.save(folder, model, optimizer, extra=halves)),
    }
    both = nn.ModuleDict({"model": model, "averaged": averaged})
    zinf_compile.save(folder, both, optimizer, wait=True)
    before = zinf_compile.full_state_dict(averaged)
    train(compiled, optimizer, range(1))
    averaged.update_parameters(model)
    zinf_compile.load(folder, both, optimizer)
    assert_equal(zinf_compile.full_state_dict(averaged), before)
    return found


def wrong_on_one_rank(rank: int, size: int, folder: str) -> dict[str, str]:
    """Save and load with arguments that are wrong on the last rank alone, training on after each; return the errors by case."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed({"timeout_s": 60}, size))
    train(compiled, optimizer, range(1))
    saved = zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    wrong = rank == size - 1

    def given(there: Any, elsewhere: Any) -> Any:
        return there if wrong else elsewhere

    cases: dict[str, Callable[[], object]] = {
        "save, folder": lambda: zinf_compile.save(given(None, folder), model, optimizer),
        "save, keep": lambda: zinf_compile.save(folder, model, optimizer, keep=given(0, 1)),
        "save, optimizer": lambda: zinf_compile.save(folder, model, given("x", optimizer)),
        "save, another folder": lambda: zinf_compile.save(given(f"{folder}/other", folder), model, optimizer),
        "load, folder": lambda: zinf_compile.load(given(None, saved), model, optimizer),
        "load, optimizer": lambda: zinf_compile.load(saved, model, given("x", optimizer)),
    }
    found = {}
    for number, (name, act) in enumerate(cases.items(), 1):
        found[name] = outcome(act)
        train(compiled, optimizer, range(number, number + 1))
    assert os.listdir(folder) == ["saved"]
    zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    assert zinf_compile.load(f"{folder}/saved", model, optimizer) == {}
    return found
