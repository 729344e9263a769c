"""Models for the dump, and their real runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from capturing import capturing_backend
from recurrent import Looped, batch
from torch import nn

from zinf_compile.cli.models import GPT
from zinf_compile.ir.program import Program, digest_of

NOT_A_FUNCTION = 3


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return a model each of whose parameters is gathered once in the forward and once in the backward."""
    model = nn.Sequential(nn.Linear(24, 48, bias=False), nn.ReLU(), nn.Linear(48, 12, bias=False))
    return model, torch.zeros(5, 24, requires_grad=True)


def its_own_bug() -> tuple[nn.Module, torch.Tensor]:
    """Raise what a mistake of the user's raises."""
    raise KeyError("layers")


def more_inputs() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return more inputs than the forward takes."""
    return mlp()[0], (torch.zeros(5, 24), torch.zeros(5, 24))


def nothing_to_compile() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose forward Dynamo leaves to eager code."""
    return Looped(), batch(0, 0)


def cast() -> tuple[nn.Module, torch.Tensor]:
    """Return `mlp` in bf16, cast as users do."""
    model, x = mlp()
    return model.bfloat16().to(torch.float64).to(torch.bfloat16), x.detach().bfloat16()


class Routed(nn.Module):
    """Sends the rows that a value chooses through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.where(x[:, 0] > 0)[0]
        return x.index_add(0, rows, self.layer(x[rows]))


def routed() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose shapes depend on values."""
    return Routed(), torch.zeros(5, 4)


class Eval(nn.Module):
    """Has no parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def inference() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose only graph is an inference graph."""
    return Eval(), torch.zeros(2, 4)


class Half(nn.Sequential):
    """Computes in half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def half_mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return the same model under autocast."""
    model, x = mlp()
    return Half(*model.children()), x


def tiny_gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a GPT with uneven sizes."""
    model = GPT(layers=2, width=20, heads=2, vocabulary=67, length=17)
    tokens = torch.zeros(3, 17, dtype=torch.long)
    return model, (tokens, tokens)


def on_meta() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the same as `tiny_gpt`, without values; two of its parameters are tied."""
    with torch.device("meta"):
        return tiny_gpt()


def input_that_learns(device: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and an input that gets a gradient."""
    with torch.device(device):
        return nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(2, 7, requires_grad=True)


class KeepsList(nn.Module):
    """A module with a parameter in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))
        self.weights = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[0]


def list_on_meta() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a tensor on meta where it can't be replaced."""
    with torch.device("meta"):
        return KeepsList(), torch.zeros(2, 3)


def model_on_meta() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the same, but with inputs that are there."""
    with torch.device("meta"):
        model, _ = tiny_gpt()
    return model, tiny_gpt()[1]


def by_keyword() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return inputs by name."""
    model, (tokens, targets) = tiny_gpt()
    return model, {"tokens": tokens, "targets": targets}


class Broken(nn.Module):
    """A model in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return F.relu(self.second(x))


def broken() -> tuple[nn.Module, torch.Tensor]:
    """Return a model with a graph break."""
    return Broken(), torch.zeros(2, 7)


def not_a_model() -> int:
    """Return something a dump can't use."""
    return 7


def real_run(rank: int, world_size: int, options: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Train one step for real; return the hash of the schedule and the collectives in order."""
    model, inputs = tiny_gpt()
    programs: list[Program] = []
    torch.compile(model, backend=capturing_backend(programs, options))(*inputs).backward()
    lines = [line for program in programs for line in program.sequence]
    return digest_of(lines), lines
