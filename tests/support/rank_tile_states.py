"""Optimizer states of one of two ranks, saved in tiles, loaded into models in other tiles."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import generator
from near import assert_near
from tiers import in_pieces
from torch import nn
from torch.optim import Optimizer
from training import BACKEND, assert_same

import zinf_compile
from zinf_compile.errors import StoreWarning, UnsupportedOptimizerError
from zinf_compile.optim.state_layout import LAYOUT

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
TILE = 1024
"""Cuts the first layer's weight into four, twice as much into two."""


class Tall(nn.Module):
    """Of its products only one is in tiles, whose outputs these split. (A bias would be summed in parts.)"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out.square().mean()


class Run:
    """A model and its optimizer, which begin with given weights and states."""

    def __init__(self, name: str, options: dict[str, Any], weights: Any, state: Any = None) -> None:
        torch.compiler.reset()
        model = Tall()
        model.load_state_dict(weights)
        model.compile(backend=BACKEND, options=options)
        self.model, self.optimizer = model, OPTIMIZERS[name](model.parameters())
        if state is not None:
            self.load(state)

    def load(self, state: Any) -> None:
        """Load states; a copy, since PyTorch goes on in the memory that it is given."""
        self.optimizer.load_state_dict(copy.deepcopy(state))

    def train(self, *steps: int) -> Any:
        """Take some steps, each on data of its own and this rank's; return the whole weights, on all ranks."""
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 16, generator=generator(step, dist.get_rank()))).backward()
            self.optimizer.step()
        found = [zinf_compile.full_state_dict(self.model)]
        dist.broadcast_object_list(found)
        return found[0]

    def refuse(self, act: Callable[[], object]) -> str:
        """Do what is refused and changes nothing; return what is said."""
        before = self.train()
        with pytest.raises(UnsupportedOptimizerError) as error:
            act()
        assert_same_values(before, self.train(), "after a refusal")
        return str(error.value)


def assert_same_values(expected: Any, found: Any, what: object) -> None:
    """Compare tensors by name."""
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_same(f"{name}, {what}", value, found[name])


def assert_near_values(expected: Any, found: Any, what: object) -> None:
    """Compare tensors by name that were computed in tiles of other sizes: products of other shapes may round otherwise.

    By far less than a wrong state would change a step.
    """
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_near(f"{name}, {what}", found[name], value)


def whole(name: str, shards: list[dict[str, Any]], like: torch.Tensor) -> torch.Tensor:
    """Join what the ranks have saved of one state of one parameter: what `full_optimizer_state_dict` gives, by hand."""
    flat = torch.empty(like.numel(), dtype=shards[0][name].dtype)
    for shard in shards:
        done = 0
        for start, end in shard["zinf_layout"]["elements"]:
            flat[start:end] = shard[name][done : done + end - start]
            done += end - start
    return flat.view(like.shape)


def join(states: list[Any]) -> Any:
    """Join the ranks' state dicts."""
    joined = {**states[0], "state": {}}
    for index, parameter in enumerate(Tall().parameters()):
        shards = [state["state"][index] for state in states]
        local = {name for name, value in shards[0].items() if isinstance(value, torch.Tensor) and value.dim()}
        small = {name: value for name, value in shards[0].items() if name not in {*local, LAYOUT}}
        joined["state"][index] = small | {name: whole(name, shards, parameter) for name in local}
    return joined


def change_tiles(rank: int, size: int, folder: str, name: str, tiers: tuple[str, ...]) -> list[str]:
    """Load states that were saved in tiles into models in the same, in others and in none; return what is said of it."""
    warnings.filterwarnings("ignore", category=StoreWarning)
    at_once: dict[str, Any] = dict.fromkeys(tiers, "nvme") | ({"nvme": folder} if tiers else {}) | in_pieces(96)
    in_tiles, in_others = {**at_once, "tile": TILE}, {**at_once, "tile": 2 * TILE}
    torch.manual_seed(3)
    first = Run(name, in_tiles, Tall().state_dict())
    weights = first.train(0, 1)
    torch.save(first.optimizer.state_dict(), Path(folder) / f"{rank}.pt")
    expected = first.train(2, 3)

    def compare(options: dict[str, Any]) -> Callable[[Any, Any, object], None]:
        return assert_same_values if options is in_tiles else assert_near_values

    states = [torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in range(size)]

    for options, state in ((in_tiles, states[rank]), *((o, join(states)) for o in (in_tiles, in_others, at_once))):
        compare(options)(expected, Run(name, options, weights, state).train(2, 3), options)
    said = []
    for options, state in ((in_others, states[rank]), (at_once, states[rank]), (in_tiles, states[1 - rank])):
        run = Run(name, options, weights, state)
        said.append(run.refuse(lambda run=run: run.train(2)))  # type: ignore[misc]
        run.load(join(states))
        compare(options)(expected, run.train(2, 3), options)
    said.append(_refused_between_steps(Run(name, at_once, weights), states[rank], at_once=bool(tiers)))
    for state in states[rank]["state"].values():
        del state[LAYOUT]
    with pytest.warns(UserWarning, match="don't say which elements") as warned:
        assert_same_values(expected, Run(name, in_tiles, weights, states[rank]).train(2, 3), "without a note")
    return [*said, *(str(warning.message) for warning in warned)]


def _refused_between_steps(run: Run, state: Any, *, at_once: bool) -> str:
    """Load after a step: with `at_once`, where steps go chunk by chunk, that is refused and changes nothing."""
    run.train(2)
    if not at_once:
        run.load(state)
        return run.refuse(lambda: run.train(3))
    before = copy.deepcopy(run.optimizer.state_dict()["state"])
    said = run.refuse(lambda: run.load(state))
    for index, kept in run.optimizer.state_dict()["state"].items():
        assert_same_values(before[index], kept, index)
    return said
