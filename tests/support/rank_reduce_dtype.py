"""bf16 training whose gradients are reduced and added up in fp32, against a hand-written loop, on one rank or several."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tiers import Sundry, compiled, context_of, in_pieces, words
from torch import nn
from training import assert_same, whole_gradient

import zinf_compile
from zinf_compile.errors import BudgetError, StoreWarning
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.gradient import ShardedGradient

STEPS = 2
LARGEST_NORM = 0.1
SMALL_PIECES = in_pieces(96)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training came to."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """Whole, as they are kept, after the last backward of each step, not yet clipped."""
    values: dict[str, torch.Tensor]


def build() -> nn.Module:
    torch.manual_seed(5)
    return Sundry().bfloat16()


def by_hand(rank: int, size: int, micro_batches: int, options: Mapping[str, Any]) -> Trained:
    """Train eagerly: each rank's bf16 gradients are cast to fp32, summed in rank order, averaged and added up.

    Where there are tiles, which change a gradient's bits, it is that of a twin in such tiles, of one micro-batch each.
    """
    tiled = "tile" in options
    torch.compiler.reset()
    model = compiled(build(), {"compute": "fx", "tile": options["tile"], "bucket": options["bucket"]}) if tiled else build()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone().float() for name, p in named.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01, fused=True)
    losses, gradients = [], []
    for step in range(STEPS):
        sums: dict[str, torch.Tensor] = {}
        for micro in range(micro_batches):
            loss = model(words(step, micro, rank))
            losses.append(loss.item())
            loss.backward()
            for name, p in named.items():
                mean = averaged(whole_gradient(p).float(), size)  # type: ignore[union-attr]
                sums[name] = sums[name] + mean if name in sums else mean
                p.grad = None
        gradients.append({name: total.clone() for name, total in sums.items()})
        for name, master in masters.items():
            master.grad = sums[name]
        clip(masters.values(), exact=size == 1 and not tiled)
        optimizer.step()
        with torch.no_grad(), zinf_compile.gathered(model, write=True) if tiled else contextlib.nullcontext():
            for name, p in named.items():
                p.copy_(masters[name])
    return Trained(losses, gradients, {name: p.detach() for name, p in model.named_parameters()})


def clip(parameters: Iterable[torch.Tensor], *, exact: bool) -> None:
    """Clip gradients, where the norm has the bits of one taken over whole gradients; else halve them."""
    if exact:
        nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        return
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(0.5)


def averaged(gradient: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean over the ranks, added up in rank order."""
    if size == 1:
        return gradient
    everyone = [torch.empty_like(gradient) for _ in range(size)]
    dist.all_gather(everyone, gradient.contiguous())
    total = everyone[0]
    for other in everyone[1:]:
        total = total + other
    return total / size


def compiled_run(rank: int, size: int, micro_batches: int, options: Mapping[str, Any]) -> Trained:
    """Train alike with the backend; `p.grad` is bf16 at every moment."""
    torch.compiler.reset()
    model = compiled(build(), {"compute": "fx", "master": "float32", **SMALL_PIECES, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = model(words(step, micro, rank))
            losses.append(loss.item())
            loss.backward()
        gradients.append({name: kept(p.grad) for name, p in model.named_parameters() if p.requires_grad})
        clip(model.parameters(), exact=size == 1 and "tile" not in options)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step))
    return Trained(losses, gradients, whole_values(model))


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters on every rank."""
    with zinf_compile.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def kept(grad: torch.Tensor | None) -> torch.Tensor:
    """Return a whole gradient as it is kept; check what it shows."""
    assert isinstance(grad, ShardedGradient)
    assert grad.dtype == torch.bfloat16
    whole = grad.to(grad.kept_dtype).full_tensor()
    assert_same("the whole as it shows", whole.bfloat16(), grad.full_tensor())
    assert_same("a copy", whole, copy.deepcopy(grad).to(grad.kept_dtype).full_tensor())
    return whole


def assert_trained_alike(found: Trained, expected: Trained, what: str) -> None:
    """Compare bit by bit."""
    assert found.losses == expected.losses, f"{what}: losses"
    for step, (theirs, ours) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        assert theirs.keys() == ours.keys()
        for name, value in theirs.items():
            assert_same(f"{what}: gradient of {name} in step {step}", value, ours[name])
    for name, value in expected.values.items():
        assert_same(f"{what}: {name}", value, found.values[name])


def prepare() -> None:
    """Ignore warnings of what these tests mean to do."""
    warnings.filterwarnings("ignore", category=StoreWarning)  # of a folder in memory
    warnings.filterwarnings("ignore", "all .* parameters are torch.bfloat16 and updated in that precision")


def table(rank: int, size: int, folder: str, rows: list[dict[str, Any]], micro_batches: list[int]) -> int:
    """Train with each row of options and each number of micro-batches; return how many were alike."""
    prepare()
    with simulating(SimulatedDevice()):
        for count in micro_batches:
            whole = by_hand(rank, size, count, {})
            for row in rows:
                if "tile" in row and size > 1:  # its bits are those of all in tiles on the device
                    expected = compiled_run(rank, size, count, {"tile": row["tile"], "bucket": row["bucket"]})
                else:
                    expected = by_hand(rank, size, count, row) if "tile" in row else whole
                found = compiled_run(rank, size, count, {**row, "nvme": folder} if "nvme" in row.values() else row)
                assert_trained_alike(found, expected, f"{row}, {count} micro-batches")
    return len(rows) * len(micro_batches)


def train_within(options: Mapping[str, Any], cap: int, rank: int) -> None:
    """Accumulate, clip and update twice; what is held never exceeds the cap."""
    torch.compiler.reset()
    gc.collect()
    model = compiled(
        build(), {"compute": "fx", "master": "float32", "bucket": 512, "device_memory": cap, **SMALL_PIECES, **options}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for micro in range(2):
            loss = model(words(step, micro, rank))
            context = context_of(model)
            if not (step or micro):  # of other models, over the same ranks
                context.memory.ledger.forget_peaks()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        zinf_compile.synchronize()
        assert context.memory.ledger.total()[1] <= cap, f"{options}: {context.memory.ledger.peak()}"


def smallest_cap(options: Mapping[str, Any], rank: int, *, before: Callable[[], None] = lambda: None) -> int:
    """Return the cap that errors come to name; it works, and one byte less doesn't. `before` is called before each training."""
    cap = 1
    for _ in range(6):
        before()
        try:
            train_within(options, cap, rank)
        except BudgetError as error:
            named = re.findall(r"[Tt]he smallest(?: \w+)? that works is ([\d,]+)", str(error))
        else:
            break
        assert named, "an error of a cap names one"
        last, cap = cap, int(named[0].replace(",", ""))
        assert cap > last
    before()
    try:
        train_within(options, cap - 1, rank)
    except BudgetError:
        return cap
    raise AssertionError(f"{options}: {cap} is not the smallest")


class Rows(nn.Module):
    """The gradient of each row is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight).float().sum()


class Weights(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().sum()


SMALL = 2.0**-10
"""What bf16 loses beside 1."""


def small_contributions(rank: int, size: int, folder: str) -> None:
    """One rank contributes what bf16 loses beside the other's; and the second micro-batch what it loses beside the first's."""
    exact = (1 + SMALL) / 2 + SMALL
    for options, expected in (
        ({"master": "float32"}, exact),
        ({"reduce_dtype": torch.float32, "tile": 32}, exact),
        ({"master": "float32", "tile": 32, "grads": "nvme", "nvme": folder, **SMALL_PIECES}, exact),
        ({"master": "float32", "reduce_dtype": "bfloat16"}, 0.5),
    ):
        torch.compiler.reset()
        model = compiled(Rows().bfloat16(), options)
        for x in (SMALL if rank else 1.0, SMALL):
            model(torch.full((1, 8), x, dtype=torch.bfloat16)).backward()
        grad = model.weight.grad
        assert len(model.weight._zinf_unit.tiles) == (4 if "tile" in options else 0)
        assert isinstance(grad, ShardedGradient)
        assert grad.dtype == torch.bfloat16
        assert grad.float().full_tensor().unique().tolist() == [expected], options
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        digits = torch.finfo(torch.bfloat16 if options.get("reduce_dtype") == "bfloat16" else torch.float32).eps
        torch.testing.assert_close(norm.double(), torch.full((7, 8), expected).double().norm(), rtol=digits, atol=0)


def scaled(rank: int, size: int) -> list[int]:
    """GradScaler on two ranks: what it scales and steps with isn't rounded. Returns the bytes that went to the other rank."""
    model = compiled(Weights().bfloat16(), {"master": "float32"})
    model(torch.zeros(3, 5, dtype=torch.bfloat16))
    before = to_ranks(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1.0)  # by g / (g + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.full((3, 5), SMALL if rank else 1.0, dtype=torch.bfloat16))).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.float().full_tensor().unique().tolist() == [(1 + SMALL) / 2]
    sent = to_ranks(model) - before
    scaler.step(optimizer)
    scaler.update()
    masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
    valid = 8 if rank == 0 else 7
    gradient = torch.tensor((1 + SMALL) / 2)
    torch.testing.assert_close(masters[0][:valid], (1 - gradient / (gradient + 1)).expand(valid), rtol=1e-6, atol=0)
    return [sent]


def to_ranks(model: nn.Module) -> int:
    """Return the bytes that went to other ranks so far."""
    sent: int = zinf_compile.stats(model)["links"]["to ranks"]["bytes"]
    return sent


class PartlyEager(nn.Module):
    """Half of it is never compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = Weights(), Weights()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) + torch.compiler.disable(self.outside)(x)


def companions(rank: int, size: int) -> None:
    """A sum over two ranks that fp16 can't hold, of a parameter that no graph uses; its gradient comes back in fp16."""
    torch.compiler.reset()
    model = compiled(PartlyEager().half(), {"master": "float32"})
    model(torch.full((3, 5), 40000.0, dtype=torch.float16)).backward()
    grad = model.outside.weight.grad
    assert not isinstance(grad, ShardedGradient)
    assert grad is not None
    assert (grad.dtype, grad.unique().tolist()) == (torch.float16, [40000.0])
    assert model.inside.weight.grad.full_tensor().unique().tolist() == [40000.0]  # type: ignore[union-attr]


def all_of_it(rank: int, size: int, folder: str) -> tuple[int, list[int]]:
    """What several ranks are needed for."""
    prepare()
    small_contributions(rank, size, folder)
    sent = scaled(rank, size)
    companions(rank, size)
    return table(rank, size, folder, ROWS[:2], [2]), sent


EVERYWHERE = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
ROWS: list[dict[str, Any]] = [
    {"tile": 128, "bucket": 512},
    EVERYWHERE,
    {},
    {"grads": "host", "optimizer": "host"},
    {"grads": "nvme", "tile": 128, "bucket": 512},
    {**EVERYWHERE, "tile": 128, "bucket": 512, "update": "device"},
]
