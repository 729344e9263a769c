"""Checks of the GPU self-test that train: a small GPT, whose bits are those of eager PyTorch wherever its states live."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zinf_compile.checkpoint.gathered import full_state_dict
from zinf_compile.ir.tiers import TIERS, Tier
from zinf_compile.reset import reset
from zinf_compile.runtime.system.library_memory import take_workspaces
from zinf_compile.stats import stats

from .models import GPT
from .selftest_check import Finding, NotHere

STEPS = 3

_SEGMENTS = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
"""By the name of today and the older one: the first counts where both are set."""
_IN_SEGMENTS = """
import sys, torch
from zinf_compile.cli import selftest_training
found = selftest_training.digest(torch.device(sys.argv[1]))
print(found, any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()))
"""


class Trained(NamedTuple):
    """What training left."""

    values: list[torch.Tensor]
    """Losses, then parameters, in host memory."""
    account: Mapping[str, Any]
    """See `zinf_compile.stats`; empty for eager PyTorch."""
    before: int
    """Bytes that PyTorch's allocator had given out before: to others, and to libraries."""
    allocated: int
    """The most that it had given out at a time, with those before."""

    def digest(self) -> str:
        """Return a hash of all bits."""
        found = hashlib.sha256()
        for value in self.values:
            found.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def same(self, other: Trained) -> bool:
        """Say whether all bits are the same."""
        return all(map(torch.equal, self.values, other.values))


def train(
    device: torch.device,
    options: Mapping[str, Any] | None,
    *,
    micro_batches: int = 1,
    clip: float | None = None,
    between: Callable[[], object] = lambda: None,
) -> Trained:
    """Train a new GPT with these options, or in eager PyTorch; `between` is called after each step."""
    torch.compiler.reset()
    reset()
    torch.manual_seed(3)
    take_workspaces(device)
    before = torch.accelerator.memory_allocated(device)
    model = GPT(layers=3, width=96, heads=3, vocabulary=307, length=32).to(device)
    called: Any = model
    if options is not None:
        called = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    generator, losses = torch.Generator().manual_seed(5), []
    torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        for _ in range(micro_batches):
            tokens = torch.randint(307, (2, 4, 32), generator=generator).to(device)
            loss = called(tokens[0], tokens[1]) / micro_batches
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        between()
    allocated = torch.accelerator.max_memory_allocated(device)
    account = {} if options is None else stats(model)
    values = full_state_dict(model) if options is not None else dict(model.named_parameters())
    found = [*losses, *(values[name] for name, _ in model.named_parameters())]
    return Trained([value.detach().cpu() for value in found], account, before, allocated)


def placements(device: torch.device, nvme: str | None) -> Finding:
    """Compare every placement of states with eager PyTorch; the device updates, so that all arithmetic is its own."""
    expected = train(device, None)
    tiers = [tier for tier in TIERS if nvme is not None or not tier.in_folders]
    different, tried = [], list(itertools.product(tiers, repeat=3))
    for place in tried:
        options: dict[str, Any] = dict(zip(("params", "grads", "optimizer"), place, strict=True))
        options |= {"update": "device"}
        if Tier.NVME in place:
            options.update(nvme=nvme)
        if not train(device, options).same(expected):
            different.append("/".join(place))
    drives = "" if nvme is not None else "; none on a drive: give --nvme DIR"
    if different:
        return Finding(False, f"{len(different)} of {len(tried)} differ from eager PyTorch: {', '.join(different)}{drives}")
    return Finding(True, f"{len(tried)} of {len(tried)} as eager PyTorch, {STEPS} steps of a GPT{drives}")


def gradients(device: torch.device) -> Finding:
    """Compare gradients that are accumulated and clipped, on the host, with eager PyTorch."""
    expected = train(device, None, micro_batches=3, clip=0.1)
    found = train(device, {"grads": "host", "update": "device"}, micro_batches=3, clip=0.1)
    text = "as eager PyTorch" if found.same(expected) else f"{found.digest()} is not eager PyTorch's {expected.digest()}"
    return Finding(found.same(expected), f"on the host, of 3 micro-batches: {text}")


def inductor(device: torch.device) -> Finding:
    """Compare states on the host with states on the device, both compiled by Inductor."""
    if device.type not in ("cuda", "xpu"):
        raise NotHere(f"Inductor has no code for {device.type}")
    host = {"params": "host", "grads": "host", "optimizer": "host", "update": "device"}
    with kernels_by_rule():
        expected = train(device, {"compute": "inductor", "params": Tier.DEVICE})
        found = train(device, {"compute": "inductor", **host})
    return Finding(found.same(expected), f"states on the host: {found.digest()}, on the device: {expected.digest()}")


@contextlib.contextmanager
def kernels_by_rule() -> Iterator[None]:
    """Let Inductor take each reduction's blocks by rule: by default it times several, and their sums differ in the last bits.

    What takes no longer this time may take longer the next time, so that one model that is compiled twice has other bits. Setting
    `torch._inductor.config.deterministic` doesn't last: Dynamo sets it by PyTorch's own switch behind each compile.
    """
    enabled, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warned)


def peak(device: torch.device) -> Finding:
    """Compare what PyTorch's allocator gave out with a cap below what everything on the device takes."""
    all_there = train(device, {"params": Tier.DEVICE})
    cap = all_there.before + (all_there.allocated - all_there.before) * 9 // 10
    found = train(device, {"device_memory": cap, "bucket": "64KiB"})
    ours, taken = found.account["memory"][Tier.DEVICE]["peak"]["all"], found.allocated
    return Finding(
        ours <= cap and taken <= cap + _ROUNDED,
        f"cap {cap:,} bytes; PyTorch gave out {taken:,}, of which {ours:,} are states and transfers, {found.before:,} were out "
        "before; allocators round",
    )


_ROUNDED = 256 << 10
"""Bytes by which allocators may round all tensors of these models up."""


def second_model(device: torch.device) -> Finding:
    """Train a plain model on the same device between our steps: both have the bits that they have alone."""

    def plain() -> tuple[Callable[[], None], list[torch.Tensor]]:
        torch.manual_seed(7)
        model, losses = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device), list[torch.Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x = torch.linspace(-1, 1, 512).view(8, 64).to(device)

        def step() -> None:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        return step, losses

    host = {"params": "host", "grads": "host", "optimizer": "host", "update": "device"}
    alone = train(device, host)
    step, theirs_alone = plain()
    for _ in range(STEPS):
        step()
    between, theirs = plain()
    ours = train(device, host, between=between)
    same = ours.same(alone), all(map(torch.equal, [t.cpu() for t in theirs], [t.cpu() for t in theirs_alone]))
    return Finding(all(same), f"ours {'as' if same[0] else 'not as'} alone, the other {'as' if same[1] else 'not as'} alone")


def expandable_segments(device: torch.device) -> Finding:
    """Train in a process whose allocator has expandable segments, and did allocate some."""
    if device.type != "cuda":
        raise NotHere(f"no setting of {device.type}")
    expected = digest(device)
    command = [sys.executable, "-c", _IN_SEGMENTS, str(device)]
    done = subprocess.run(command, env=os.environ | _SEGMENTS, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        return Finding(False, f"the process ended with status {done.returncode}: {done.stderr[-400:]}")
    found, expandable = done.stdout.split()[-2:]
    if expandable != "True":
        raise NotHere("PyTorch's allocator has none on this system")
    return Finding(found == expected, f"{found} with them, {expected} without")


def digest(device: torch.device) -> str:
    """Return a hash of what training with states on the host gives."""
    return train(device, {"params": "host", "grads": "host", "optimizer": "host", "update": "device"}).digest()
