"""Parameters in tiles on several ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rank_tiers import train_in_tiles
from tiers import PLACEMENTS, Placement, compiled, context_of, in_pieces, options_for
from torch import nn
from torch.nn import functional as F
from training import assert_same

import zinf_compile
from zinf_compile.errors import StoreWarning
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.system.malloc import return_free_memory
from zinf_compile.sharded.parameter import ShardedParameter


class Wide(nn.Module):
    """Large enough for tiles of whole vectors on three ranks; the embedding's last is shorter, and its shards have padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        self.up = nn.Linear(16, 48)
        self.down = nn.Linear(48, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(words))
        x = x + self.down(torch.tanh(self.up(x)))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def wide(dtype: torch.dtype) -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(5)
    return Wide().to(dtype)


def train_in_tiles_of_ranks(
    rank: int,
    size: int,
    folder: str,
    dtype: torch.dtype,
    compute: str,
    *,
    fake: bool,
    placements: Sequence[Placement] | None = None,
    device: str | None = None,
) -> int:
    """Train with states anywhere, or at these places."""
    tile = 200 * dtype.itemsize
    return train_in_tiles(rank, size, folder, dtype, compute, tile, fake=fake, build=wide, placements=placements, device=device)


CAP = 1 << 20
TILE = CAP // 8


class Huge(nn.Module):
    """Its largest weight is eight times what may be on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 256)
        self.huge = nn.Linear(256, 8 * CAP // 1024, bias=False)
        self.last = nn.Linear(8 * CAP // 1024, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.huge(torch.tanh(self.first(x)))))
        return out


def train_beyond_the_cap(
    rank: int,
    size: int,
    folder: str,
    fake: bool = False,
    *,
    device: str | None = None,
    placements: Sequence[Placement] = PLACEMENTS,
) -> list[float]:
    """Train where the device may hold an eighth of the largest weight; return losses. Raises where it ever holds more.

    At each of the placements that are off the device, which is one of PyTorch's, or played by the CPU, or else host memory. One
    of PyTorch's holds all that it allocates within the cap, also while the model is made.
    """
    warnings.filterwarnings("ignore", category=StoreWarning)
    apart = fake or device is not None
    off_device = [p for p in placements if "device" not in p and (apart or "host" not in p)]
    found: list[list[float]] = []
    for placement in off_device:
        torch.compiler.reset()
        options = options_for(placement, folder, piece=1 << 12, compute="fx", device_memory=CAP)
        with simulating(SimulatedDevice()) if fake else contextlib.nullcontext():
            if device is None:
                torch.manual_seed(0)
                model = Huge()
                assert model.huge.weight.nbytes == 8 * CAP
                call, check = compiled(model, {**options, "tile": TILE}), functools.partial(check_peak, model)
            else:
                call = born_on(device, {**options, "tile": TILE // 2})  # of which a product's temporaries are a few
                check = check_allocated
            found.append(train_batches(call, rank, check, rows=2))
    assert all(losses == found[0] for losses in found), "the placement changed bits"
    return found[0]


def born_on(device: str, options: dict[str, Any]) -> nn.Module:
    """Return `Huge`, made in tiles, compiled; what the device allocates is counted: a value is drawn whole, but on the host."""
    with torch.device("meta"):
        model = Huge()
    torch.manual_seed(0)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    zinf_compile.partition(model, device=device, **options)
    check_allocated("making the model")
    return compiled(model, options)


def check_allocated(when: str) -> None:
    """Raise where the device's allocator has held more than the cap."""
    torch.accelerator.synchronize()
    held = torch.accelerator.max_memory_allocated()
    assert held <= CAP, f"{when}: {held:,} bytes were allocated on the device"


def train_batches(
    model: nn.Module, seed: int, check: Callable[[str], None] = lambda when: None, *, width: int = 32, rows: int = 16
) -> list[float]:
    """Take three steps of two micro-batches each, with clipping; return the losses. `check` is told what was just done.

    With its usual eps AdamW divides gradients of nothing but rounding by themselves: it moves a weight by them as by any other.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(3):
        for _ in range(2):
            x = torch.randn(rows, width, generator=generator).to(next(model.parameters()).device)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            check(f"step {step}, backward")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        check(f"step {step}, clipping")
        optimizer.step()
        zinf_compile.synchronize()
        check(f"step {step}, update")
        optimizer.zero_grad()
    return losses


def check_peak(model: nn.Module, when: str) -> None:
    """Raise where the device held more than its cap since the last time."""
    ledger = context_of(model).memory.ledger
    held, kinds = ledger.total()[1], ledger.peak()
    ledger.forget_peaks()
    assert held <= CAP, f"{when}: {held:,} bytes were on the device, at most {kinds}"


class Giant(nn.Module):
    """Its largest weight is of 8 * `memory` bytes."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.giant = nn.Linear(2048, memory // 1024, bias=False)
        self.last = nn.Linear(memory // 1024, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.giant(x)))
        return out


def grow_beyond_memory(rank: int, size: int, folder: str) -> tuple[int, int]:
    """Train where a weight is of eight times `device_memory`; return by how much that made the process grow, and that cap.

    As the kernel counts it, all included but what a small model's training, which is done before, leaves: compiler, libraries.
    Making the model isn't counted: a module's tensors are drawn whole.
    """
    warnings.filterwarnings("ignore", category=StoreWarning)
    memory = 64 << 20
    _train(_giant(1 << 20, folder), 8 << 20, rank)
    return_free_memory()
    before = resident("VmRSS")
    model = _giant(memory, folder)
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    _train(model, memory, rank)
    return resident("VmHWM") - before, memory


def _giant(memory: int, folder: str) -> nn.Module:
    with torch.device("meta"):
        model = Giant(memory)
    return zinf_compile.partition(model, **options_for(("nvme", "nvme", "nvme"), folder, piece=1 << 18, tile=memory // 16))


def _train(model: nn.Module, memory: int, rank: int) -> None:
    train_batches(compiled(model, {"compute": "fx", "device_memory": memory}), rank, width=2048)
    torch._dynamo.reset()
    gc.collect()


def resident(field: str) -> int:
    """Return a field of this process's status, such as VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def live_in_tiles(rank: int, size: int, folder: str, tier: str, device: str = "cpu") -> None:
    """Make a model in tiles in all ways, save and load it; raise where a value isn't what it is in a plain model."""
    warnings.filterwarnings("ignore", category=StoreWarning)
    places = {"params": tier, **({"nvme": folder} if tier == "nvme" else {})}
    options = {"tile": 800, "device": device, **places, **in_pieces(96)}
    torch.manual_seed(5)
    expected = Wide().state_dict()

    def check(model: nn.Module, what: str) -> nn.Module:
        assert any(len(p._zinf_unit.tiles) > 1 for p in model.parameters() if isinstance(p, ShardedParameter)), what
        found = zinf_compile.full_state_dict(model)
        for name, value in expected.items() if rank == 0 else ():
            assert_same(f"{name} {what}", value, found[name])
        with zinf_compile.gathered(model):
            for name, value in model.named_parameters():
                assert_same(f"{name} {what}, gathered", expected[name], value.detach().cpu())
        return model

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Wide()

    torch.manual_seed(5)
    made = check(zinf_compile.partition(on_meta(), **options), "from a seed")
    torch.manual_seed(5)
    with zinf_compile.partitioned(**options):
        built = Wide()
    check(built, "built on the CPU")
    checkpoint = Path(folder) / "saved"
    zinf_compile.save_safetensors(made, checkpoint)
    loaded = check(zinf_compile.partition(on_meta(), checkpoint=checkpoint, **options), "from a checkpoint")
    changed = {name: value + 1 for name, value in expected.items()}
    zinf_compile.load_full_state_dict(loaded, changed if rank == 0 else None)
    expected.update(changed)
    check(loaded, "loaded")
    call = torch.compile(loaded, backend="zero_infinity", options={"compute": "fx"})
    words = torch.randint(23, (2, 6), generator=torch.Generator().manual_seed(rank))
    loss = call(words.to(device))
    loss.backward()
    plain = Wide()
    plain.load_state_dict(expected)
    torch.testing.assert_close(loss.cpu(), plain(words))
    assert loaded.head.weight.grad is not None
    assert loaded.head.weight.grad.full_tensor().shape == (23, 16)
