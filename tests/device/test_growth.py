"""Nothing grows: memory on both sides, events, streams, threads and files after many steps, and after many models."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import late
import pytest
import torch
from gradient_cases import Stack
from growth import train_for_long, used
from marks import more
from places import on
from rank_late import LONGEST_S, check
from tier_features import Compile
from tiers import compiled, context_of, options_for
from torch import nn

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

Counts = dict[str, int]


def counts(folder: Path) -> Counts:
    """Return what is in use once the device has done everything."""
    zinf_compile.synchronize()
    torch.accelerator.synchronize()
    descriptors, files, threads = used(folder)
    return {**late.in_use()._asdict(), "descriptors": descriptors, "files": files, "threads": threads}


def grown(looks: Sequence[Counts]) -> dict[str, list[int]]:
    """Return what grew from almost every look to the next, and ended above all that it was in the first half of them.

    Threads give memory back in another order in each step, so now and then an arena finds that it has to hold a few bytes more
    than ever before. How many events are waited for changes from look to look: of eleven numbers in any order one in fifty rises
    as often.
    """
    found = {name: [look[name] for look in looks] for name in looks[0]}
    return {name: seen for name, seen in found.items() if 3 * _rises(seen) > 2 * (len(seen) - 1) and _ends_above(seen)}


def _ends_above(seen: Sequence[int]) -> bool:
    return seen[-1] > max(seen[: len(seen) // 2])


def _rises(seen: Sequence[int]) -> int:
    return sum(later > earlier for earlier, later in itertools.pairwise(seen))


def away_to(where: str, folder: Path) -> Compile:
    return lambda model: compiled(model, options_for((where,) * 3, folder, piece=96, update="device"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", more("nvme")])
def test_nothing_grows_over_many_steps_and_models(where: str, tmp_path: Path) -> None:
    gc.collect()
    zinf_compile.reset()
    before = counts(tmp_path)
    with late.delays(LONGEST_S, seed=1, chance=0.3), on("late"):
        steps, models = train_for_long(away_to(where, tmp_path), lambda model: counts(tmp_path))
    assert grown(steps) == {}
    over_models = grown(models)
    over_models.pop("events", None)  # asserted over steps alone
    assert over_models == {}
    zinf_compile.reset()
    torch.compiler.reset()
    gc.collect()
    after = counts(tmp_path)
    for name in ("device_bytes", "pinned_bytes", "files"):
        assert after[name] == before[name], name
    check()


KEPT: dict[str, Callable[[nn.Module], object]] = {
    "device_bytes": lambda model: torch.empty(1, device="late"),
    "pinned_bytes": lambda model: context_of(model).link.host_buffer(1 << 14, torch.float32),
    "events": lambda model: torch.accelerator.current_stream().record_event(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_at_every_look_is_found(name: str, tmp_path: Path) -> None:
    kept: list[object] = []
    torch.compiler.reset()
    model = away_to("host", tmp_path)(Stack(1).to("late"))
    model(torch.ones(1, 32, device="late")).backward()

    def look() -> Counts:
        kept.extend(KEPT[name](model) for _ in range(64))
        return counts(tmp_path)

    seen = [look() for _ in range(4)]
    assert name in grown(seen)
