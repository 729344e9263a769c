"""What two ranks once got wrong, each as a case that returns a text when it is wrong again."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import BACKEND

import zinf_compile
from zinf_compile.runtime.comm.ranks import Ranks

TIMEOUT_S = 30.0


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=BACKEND, options={"timeout_s": TIMEOUT_S, **options})


class AddWeight(nn.Module):
    """The tangent is the weight's gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def gradient_memory_is_reused_by_the_caller(rank: int) -> str:
    size = 4_000_000
    model = AddWeight(size)
    call = compiled(model)
    for _ in range(3):
        grad = torch.full((size,), float(rank + 1))
        call(torch.zeros(size)).backward(grad)
        grad.zero_()
        wrong = int((model.weight.grad.full_tensor() != 1.5).sum())  # type: ignore[union-attr, operator]
        model.weight.grad = None
        if wrong:
            return f"{wrong} elements"
    return ""


class Stateful(nn.Module):
    """Replaces its buffer by a new tensor in each forward."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("state", torch.zeros(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x + self.state)
        self.state = y.detach()
        return y


def replaced_buffers_stay_local(rank: int) -> str:
    torch.manual_seed(0)
    model = Stateful()
    eager, call = copy.deepcopy(model), compiled(model)
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        x = torch.randn(3, 5)
        if not torch.equal(call(x), eager(x)):
            return f"step {step}"
    return ""


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def inference_mode_first_and_between(rank: int) -> str:
    torch.manual_seed(0)
    model = Block()
    eager, call = copy.deepcopy(model), compiled(model)
    x = torch.randn(2, 5)
    for _ in range(2):
        with torch.inference_mode():
            if not torch.equal(call(x), eager(x)):
                return "evaluation"
        call(x).sum().backward()
    return ""


def checkpoint_around_compiled_blocks(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.ModuleList([Block() for _ in range(3)])
    eager = copy.deepcopy(model)
    for block in model:
        block.compile(backend=BACKEND, options={"timeout_s": TIMEOUT_S})
    x = torch.randn(2, 5, requires_grad=True)
    for blocks in (model, eager):
        y: Any = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False)
        held = zinf_compile.memory(model)["now"].get("params")
        y.sum().backward()
        if zinf_compile.memory(model)["now"].get("params") != held:
            return "the backward partitioned the model again"
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return "" if all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in pairs) else "gradients"  # type: ignore[union-attr, operator, arg-type]


def padding_is_no_infinity(rank: int) -> str:
    model = nn.Linear(3, 1, bias=False)
    call = compiled(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(call(torch.ones(2, 3)).sum()).backward()
    model.weight.grad.div_(torch.full((1, 3), 2.0))  # type: ignore[union-attr]
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return "" if scaler.get_scale() == scale else "the step was skipped"


def a_later_model_with_other_options(rank: int) -> str:
    compiled(Block())(torch.zeros(2, 5))
    torch.compiler.reset()
    start = time.monotonic()
    try:
        compiled(Block(), bucket="1MiB" if rank else "32MiB")(torch.zeros(2, 5))
    except (zinf_compile.OptionError, zinf_compile.RankMismatchError) as error:
        late = time.monotonic() - start > TIMEOUT_S / 2
        return "" if "bucket=1048576" in str(error) and not late else str(error)
    return "no error"


def a_state_dict_hook_that_fails(rank: int) -> str:
    model = Block()
    compiled(model)(torch.zeros(2, 5))

    def fail(*_: object) -> None:
        raise KeyError("extra")

    model.register_state_dict_post_hook(fail)
    start = time.monotonic()
    try:
        zinf_compile.full_state_dict(model)
    except (KeyError, zinf_compile.PartitionedParameterError) as error:
        return "" if time.monotonic() - start < TIMEOUT_S / 2 else str(error)
    return "no error"


def clipping_takes_one_exchange(rank: int) -> str:
    model = nn.Sequential(*[Block() for _ in range(9)])
    call = compiled(model)
    call(torch.ones(2, 5)).sum().backward()
    asked, agree = [], Ranks.agree

    def counting(self: Ranks, *args: Any, **kwargs: Any) -> list[float]:
        asked.append(kwargs["what"])
        return agree(self, *args, **kwargs)

    Ranks.agree = counting  # type: ignore[method-assign]
    try:
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        again = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    finally:
        Ranks.agree = agree  # type: ignore[method-assign]
    if len(asked) != 2:
        return f"{len(asked)} exchanges"
    return "" if total > 0.5 and abs(float(again) - 0.5) < 1e-4 else f"norms {total}, {again}"


CASES: dict[str, Callable[[int], str]] = {
    function.__name__: function
    for function in (
        gradient_memory_is_reused_by_the_caller,
        replaced_buffers_stay_local,
        inference_mode_first_and_between,
        checkpoint_around_compiled_blocks,
        padding_is_no_infinity,
        clipping_takes_one_exchange,
        a_state_dict_hook_that_fails,
        a_later_model_with_other_options,
    )
}


def run_all(rank: int, world_size: int) -> dict[str, str]:
    """Run every case; return what each found wrong."""
    found = {}
    for name, case in CASES.items():
        torch.compiler.reset()
        found[name] = case(rank)
    return found
