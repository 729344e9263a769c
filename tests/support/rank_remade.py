"""Training on several ranks, of which one has more tokens than the others, where some blocks have to run again."""

from __future__ import annotations

import torch
from capped_blocks import ROWS, WIDTH, WORDS, Run, least, same


def train_with_room_for_some(rank: int, size: int, folder: str) -> list[dict[str, int]]:
    """Train under caps between the least and all kept; return what becomes of saved values. Bits are those of keeping."""
    rows = ROWS // (1 + rank)
    options = {**WORDS, **({"nvme": folder} if folder else {})}
    kept, smallest = (least(each, rows=rows) for each in ({**WORDS, "activations": "keep"}, options))
    expected = Run({}, rows=rows)
    expected.step()
    found = []
    for cap in (smallest, (smallest + kept) // 2, kept):
        run = Run({**options, "device_memory": cap}, rows=rows)
        run.step()
        assert same(run, expected), cap
        found.append(run.decided)
    return found


def compile_again_alone(rank: int, size: int) -> dict[str, int]:
    """Let the last rank alone meet a smaller batch, which has room for all that its forward saves."""
    kept, smallest = least({**WORDS, "activations": "keep"}), least(WORDS)
    losses = []
    for options in ({}, {**WORDS, "device_memory": (smallest + kept) // 2}):
        run = Run(options)
        run.step()
        for rows in (ROWS, ROWS // 8 if rank else ROWS):
            torch.manual_seed(1)
            loss = run.model(torch.ones(rows, WIDTH))
            loss.backward()
            losses.append(loss.item())
        run.optimizer.step()
        losses += run.losses
    assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
    return run.decided
