"""Training on several ranks where full parameters stay gathered from a forward to its backward, as cases of `run_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from named_cap import named_cap
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import BudgetError

WIDTH, LAYERS = 33, 4
"""Sizes that no number of ranks divides; layers of `Plain`."""


class Tied(nn.Module):
    """An embedding whose weight is the head's, a frozen layer, biases, and two products with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(51, WIDTH), nn.Linear(WIDTH, 51, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.frozen, self.down = nn.Linear(WIDTH, 70), nn.Linear(70, 70), nn.Linear(70, WIDTH, bias=False)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = x + self.down(nn.functional.gelu(self.frozen(self.up(self.norm(x)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Plain(nn.Module):
    """Products alone: forward and backward read each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return whether these are equal to the bit."""
    return found.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in found.items())


class Run:
    """A model that is compiled with some options, on one of several ranks."""

    def __init__(self, rank: int, options: dict[str, Any], model: type[nn.Module] = Tied) -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = adamw([p for p in self.model.parameters() if p.requires_grad])
        self.call: Any = torch.compile(self.model, backend=BACKEND, options={"compute": "fx", "bucket": "4KiB", **options})
        self._generator = torch.Generator().manual_seed(rank)
        self._tokens = issubclass(model, Tied)
        self.losses: list[float] = []

    def batch(self, rows: int = 3) -> torch.Tensor:
        if self._tokens:
            return torch.randint(51, (rows, 5), generator=self._generator)
        return torch.randn(rows, WIDTH, generator=self._generator)

    def step(self, *, in_flight: bool = False, between: bool = False) -> None:
        """Take a step of two micro-batches; both forwards first, or with an evaluation between them."""
        coming = (self.call(self.batch()) for _ in range(2))
        for loss in list(coming) if in_flight else coming:
            if between:
                with torch.no_grad():
                    self.losses.append(self.call(self.batch()).item())
            loss.backward()
            self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def received(self) -> int:
        """Bytes from other ranks in the last step."""
        return int(zinf_compile.stats(self.model)["links"]["from ranks"]["bytes_last_step"])


def train_alike(rank: int, ways: Sequence[dict[str, Any]], model: type[nn.Module], *, half: bool) -> list[int]:
    """Train with the options of two ways: the same bits. Returns what the last step of each received."""
    found, received = [], []
    for options in ways:
        run = Run(rank, options, model)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            for each in ({}, {"in_flight": True}, {"between": True}, {}):
                run.step(**each)
        found.append((run.losses, zinf_compile.full_state_dict(run.model)))
        received.append(run.received)
    (losses, state), (kept_losses, kept_state) = found
    assert losses == kept_losses
    assert same_state(state, kept_state)
    return received


def train_at_each_word(rank: int, size: int, options: dict[str, Any], half: bool) -> list[int]:
    """Train with nothing kept and with everything kept: the same bits. Returns what each step received."""
    return train_alike(rank, [{**options, "reshard_after_forward": word} for word in (True, False)], Tied, half=half)


def least_cap_of(rank: int, options: dict[str, Any], model: type[nn.Module] = Tied) -> int:
    """Return the least `device_memory` that a refusal of the smallest names."""
    with pytest.raises(BudgetError) as refused:
        Run(rank, {**options, "device_memory": 1}, model).step()
    return named_cap(refused.value)


def bytes_of_plain_steps(rank: int, size: int) -> list[int]:
    """Return what a step of one micro-batch receives, with nothing kept and with everything kept."""
    received = []
    for word in (True, False):
        run = Run(rank, {"reshard_after_forward": word}, Plain)
        for _ in range(2):
            run.call(run.batch().requires_grad_()).backward()  # or the backward doesn't read the first parameter
            run.optimizer.step()
            run.optimizer.zero_grad()
        received.append(run.received)
    return received


def change_before_the_backward(rank: int, size: int, word: bool) -> str:
    """Return the error of a backward whose parameters a step has changed since its forward."""
    run = Run(rank, {"reshard_after_forward": word})
    run.step()
    first = run.call(run.batch())
    run.call(run.batch()).backward()
    run.optimizer.step()
    with pytest.raises(RuntimeError) as raised:
        first.backward()
    return str(raised.value)


def keep_what_fits(rank: int, size: int, ranks_alike: bool) -> list[int]:
    """Train under larger and larger caps; return what a step receives at each. The last rank may have fewer rows."""
    rows = 3 if ranks_alike or rank < size - 1 else 1
    expected: list[Any] = []
    received = []
    least = least_cap_of(rank, {"tile": "1MiB"})
    for more in (0, 20_000, 40_000, 60_000, 200_000):
        run = Run(rank, {"device_memory": least + more, "tile": "1MiB"})
        for _ in range(2):
            run.call(run.batch(rows)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        found = zinf_compile.full_state_dict(run.model)
        expected = expected or [found]
        assert same_state(found, expected[0]), more
        received.append(run.received)
    return received


class Deep(Plain):
    """With 24 layers, of which a few are in flight at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(24))


class Many(torch.optim.Optimizer):
    """Keeps four states, or more, for each element."""

    def __init__(self, parameters: Any, *, states: int = 4) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self._states = states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                state = self.state[parameter]
                for number in range(self._states):
                    moment = state.setdefault(f"moment {number}", torch.zeros_like(parameter))
                    moment.lerp_(parameter.grad, 0.1 * (number + 1))
                    parameter.add_(moment, alpha=-group["lr"])


def caps_for_more_states(rank: int, size: int, word: bool | str) -> tuple[str, list[int]]:
    """Return what a step says that makes more states than two, within a cap that fits two, and train within what it names."""
    options = {"tile": "1MiB", "reshard_after_forward": word}

    def train(cap: int) -> Run:
        run = Run(rank, {**options, "device_memory": cap}, Deep)
        run.optimizer = Many(run.model.parameters(), states=8)
        for _ in range(2):
            run.call(run.batch()).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    caps = [least_cap_of(rank, options, Deep)]
    with pytest.raises(BudgetError) as refused:
        train(caps[0])
    assert "device_memory that works" in str(refused.value), "the step says it: nothing before knows of a third state"
    caps.append(named_cap(refused.value))
    held = zinf_compile.stats(train(caps[1]).model)["memory"]["device"]["peak"]["all"]
    assert held <= caps[1]
    return str(refused.value), caps


def compile_again_alone(rank: int, size: int) -> list[int]:
    """Let the last rank alone meet another number of rows: it keeps what was agreed, and the collectives are the same.

    Returns what the last step received, with nothing kept and with what fits.
    """
    losses, received = [], []
    for word in (True, "auto"):
        run = Run(rank, {"device_memory": "4MiB", "tile": "1MiB", "reshard_after_forward": word})
        run.step()
        for rows in (3, 2 if rank == size - 1 else 3, 1 if rank == size - 1 else 3):
            loss = run.call(run.batch(rows))
            loss.backward()
            run.losses.append(loss.item())
        run.optimizer.step()
        losses.append(run.losses)
        received.append(run.received)
    assert losses[0] == losses[1]
    return received
