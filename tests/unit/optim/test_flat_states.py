from __future__ import annotations

import collections
import gc
import weakref

import torch

from zinf_compile.optim.flat_states import FlatStates


def test_shards_are_the_memory_of_the_states() -> None:
    states = {"step": torch.tensor(3.0), "mean": torch.zeros(3, 4), "turned": torch.zeros(4, 3).t()}
    flat = {name: value if not value.dim() else value.as_strided((12,), (1,)) for name, value in states.items()}
    known = FlatStates(states, flat)
    assert known.bytes == 4 + 2 * 48
    shards = known.of(states)
    assert shards is not None
    assert shards["step"] is states["step"]
    shards["turned"].copy_(torch.arange(12.0))
    assert states["turned"].tolist() == torch.arange(12.0).view(4, 3).t().tolist()
    assert known.of({**states, "layout": 1}, others=1) is not None
    assert known.of({}) is None
    assert known.of({**states, "other": 1}) is None


def test_other_tensors_other_memory_and_what_is_no_tensor() -> None:
    states = {"mean": torch.zeros(3, 4)}
    known = FlatStates(states, {"mean": states["mean"].view(-1)})
    assert known.of({"mean": states["mean"].clone()}) is None
    assert known.of({**states, "square": torch.zeros(3, 4)}) is None
    assert known.of({"mean": None}) is None
    assert known.of({"mean": 1.0}) is None
    states["mean"].data = torch.ones(3, 4)
    assert known.of(states) is None


def test_no_state_is_kept() -> None:
    states = {"mean": torch.zeros(3, 4)}
    known = FlatStates(states, {"mean": states["mean"].view(-1)})
    gone = weakref.ref(states["mean"])
    states.clear()
    gc.collect()
    assert gone() is None
    assert known.of({"mean": None}) is None


def test_states_that_are_the_same() -> None:
    states = {"step": torch.tensor(1.0), "mean": torch.zeros(3)}
    known = FlatStates({"mean": states["mean"]}, {"mean": states["mean"]})
    assert known.are(states)
    assert known.are(dict(states))
    assert not known.are({"step": states["step"]})
    assert not known.are({**states, "mean": torch.zeros(3)})
    assert not known.are(None)
    assert not known.are(collections.OrderedDict(states))
    states["mean"].data = torch.zeros(3)
    assert not known.are(states)


def test_states_that_an_update_left_in_place() -> None:
    states = {"mean": torch.zeros(3, 4), "count": 3}
    shards = {"mean": states["mean"].view(-1), "count": states["count"]}
    known = FlatStates(states, shards)
    shards["mean"].add_(1)
    assert known.hold(shards, dict(shards))
    assert not known.hold(shards, {**shards, "count": 4})
    assert not known.hold(shards, {**shards, "more": 4})
    assert not known.hold(shards, {"mean": shards["mean"]})
    assert not known.hold(shards, {**shards, "mean": shards["mean"].clone()})
    shards["mean"].data = torch.zeros(12)
    assert not known.hold(shards, shards)
