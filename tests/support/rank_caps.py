"""Caps on memory that ranks meet at different bytes: one holds more than another, and transfers end when they do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import Mlp
from named_cap import named_cap
from rank_reduce_dtype import build, prepare, smallest_cap
from stepped_pairs import clones, step
from tiers import compiled, context_of, in_pieces, words
from training import adamw

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.context import Context

OPTIONS = {**in_pieces(4096), "compute": "fx", "master": "float32", "tile": 256, "bucket": 512, "timeout_s": 20}
EXTRA = 1 << 13


def held_on(rank: int, context: Context, *, by: int = 1) -> torch.Tensor:
    """Return memory that counts on one rank only, for as long as it is kept."""
    held = torch.empty(EXTRA if rank == by else 0, dtype=torch.uint8)
    context.memory.ledger.track("staging", held)
    return held


def same_on_all(number: int) -> int:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, number)
    assert everyone == [number] * len(everyone)
    return number


def started() -> torch.nn.Module:
    """Return a model that is partitioned."""
    torch.compiler.reset()
    model = compiled(build(), OPTIONS)
    model(words(0, 0))
    return model


def refused(call: Callable[[], object], rank: int) -> int:
    """Call what doesn't fit on rank 1; return the cap that both ranks name."""
    with pytest.raises(BudgetError) as caught:
        call()
    said = str(caught.value)
    assert ("of rank 1." in said) == (rank == 0), said
    return same_on_all(named_cap(said))


def forget_graphs(context: Context) -> None:
    """Reserve nothing for graphs of models that are gone: Dynamo keeps them, and they were planned before a rank held more."""
    reservations = context.memory.reservations
    for made in list(reservations._made):
        reservations.remove(made)


def caps_of_all(rank: int, size: int) -> list[int]:
    """Search the smallest cap with gradients in fp32, in bf16, and with a rank that holds more: each is exact to the byte."""
    prepare()
    found = [smallest_cap({**OPTIONS, "reduce_dtype": dtype}, rank) for dtype in (None, "bfloat16")]
    context = context_of(started())
    all_refuse(rank, context, found[0])
    found.append(like_parameters(rank, found[0]))
    held = held_on(rank, context)
    found.append(smallest_cap(OPTIONS, rank, before=lambda: forget_graphs(context)))
    del held
    return [same_on_all(cap) for cap in found]


def all_refuse(rank: int, context: Context, cap: int) -> None:
    """One rank holds more: at compile, and when gradients accumulate, all refuse at the same point and go on after it."""
    held = held_on(rank, context)
    torch.compiler.reset()
    model = compiled(build(), {**OPTIONS, "device_memory": cap})
    assert refused(lambda: model(words(0, 0, rank)), rank) == cap + EXTRA
    del held
    torch.compiler.reset()
    model = compiled(build(), {**OPTIONS, "device_memory": cap})
    model(words(0, 0, rank)).backward()
    loss = model(words(0, 1, rank))
    held = held_on(rank, context)
    assert refused(loss.backward, rank) >= cap
    del held
    model(words(0, 1, rank)).backward()
    torch.optim.AdamW(model.parameters(), lr=0.01).step()


def like_parameters(rank: int, cap: int) -> int:
    """Search the smallest cap with which tensors like a parameter fit beside a model that trains in `cap` bytes."""

    def said(cap: int, count: int = 1000) -> tuple[str, int]:
        torch.compiler.reset()
        model = compiled(build(), {**OPTIONS, "device_memory": cap})
        model(words(0, 0, rank)).backward()
        weight, kept = model.embedding.weight.detach(), []
        try:
            for _ in range(count):
                kept.append(weight * 2)
        except BudgetError as error:
            return str(error), len(kept)
        return "", len(kept)

    before, count = cap, said(cap)[1] + 2
    while refused := said(cap, count)[0]:
        cap = int(re.findall(r"smallest device_memory that works is ([\d,]+)", refused)[0].replace(",", ""))
    assert cap > before
    assert f"{cap:,}" in said(cap - 1, count)[0]
    return cap


def average_within(rank: int, world: int, folder: str, cap: int) -> int:
    """Copy all parameters beside states on a drive, within a small cap; return the peak."""
    torch.compiler.reset()
    model = compiled(Mlp(), {"optimizer": "nvme", "nvme": folder, "device_memory": cap, "compute": "fx", "timeout_s": 20})
    step(model, adamw(model.parameters()))
    assert all(average.numel() for average in clones(model))
    peak: int = zinf_compile.stats(model)["memory"]["device"]["peak"]["all"]
    return peak


def host_memory_of_this_node(rank: int, ranks: int) -> tuple[int, int, str]:
    """Return the `host_memory` that a refusal names, the most bytes that this rank then held in training, and the refusal."""
    assert "LOCAL_WORLD_SIZE" not in os.environ, "nothing says how many share the node, as with torch.multiprocessing.spawn"

    def trained(cap: int) -> Mlp:
        torch.compiler.reset()
        model = compiled(Mlp(), {"compute": "fx", "host_memory": cap})
        optimizer = adamw(model.parameters())
        for _ in range(2):
            step(model, optimizer)
        return model

    with pytest.raises(BudgetError) as caught:
        trained(1)
    (found,) = re.findall(r"[Tt]he smallest host_memory that works is ([\d,]+)", str(caught.value))
    cap = same_on_all(int(found.replace(",", "")))
    peak: int = zinf_compile.stats(trained(cap))["memory"]["device"]["peak"]["all"]  # the host's memory
    return cap, peak, str(caught.value)
