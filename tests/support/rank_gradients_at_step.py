"""Training on several ranks whose gradients are reduced at the step, as cases of `run_ranks`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_kept_units import WIDTH, Plain, Run, Tied, least_cap_of, same_state
from torch import nn

import zinf_compile
from zinf_compile.errors import OptionError, PartitionedParameterError

AT_STEP = {"reduce_grads": "step"}


class Broken(Tied):
    """`Tied` in two graphs, each of which uses the tied weight."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        x = x + self.down(nn.functional.gelu(self.frozen(self.up(self.norm(x)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Whole:
    """The same model, whole on this rank: gradients of several backwards are added up, in some type, and then averaged."""

    def __init__(self, run: Run, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.model = copy.deepcopy(run.model)
        self.call: Any = torch.compile(self.model, backend="aot_eager")
        self.sums: dict[str, torch.Tensor] = {}

    def add(self) -> None:
        """Add what a backward has given."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to(self._dtype)
                self.sums[name] = self.sums[name] + grad if name in self.sums else grad
                parameter.grad = None

    def averages(self, size: int) -> dict[str, torch.Tensor]:
        """Return the averages of the sums, taken in the order of ranks."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if name in self.sums:
                parts = [torch.empty_like(self.sums[name]) for _ in range(size)]
                dist.all_gather(parts, self.sums[name])
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                found[name] = (total / size).to(parameter.dtype)
        self.sums.clear()
        return found

    def check(self, run: Run, size: int) -> None:
        """Compare gradients, then follow the other model's step: fused kernels round a shard's last elements in another way."""
        expected = self.averages(size)
        for name, parameter in run.model.named_parameters():
            assert (name in expected) == (parameter.grad is not None), name
            assert parameter.grad is None or torch.equal(parameter.grad.full_tensor(), expected[name]), name
        run.optimizer.step()
        run.optimizer.zero_grad()
        state = [zinf_compile.full_state_dict(run.model)]
        dist.broadcast_object_list(state)
        self.model.load_state_dict(state[0])


def train(rank: int, size: int, options: dict[str, Any], model: str, half: bool) -> None:
    """Train with three backwards to a step: the bits of whole models that average once."""
    run = Run(rank, {**options, **AT_STEP}, {"tied": Tied, "plain": Plain, "broken": Broken}[model])
    whole = Whole(run, torch.float64 if "reduce_dtype" in options else torch.float32)
    for _ in range(3):
        for _ in range(3):
            batch = run.batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                losses = [call(batch) for call in (run.call, whole.call)]
            for loss in losses:
                loss.backward()
            whole.add()
            assert losses[0].equal(losses[1])
        whole.check(run, size)


def one_backward_is_as_before(rank: int, size: int, options: dict[str, Any]) -> None:
    """Train with one backward to a step, with clipping: the bits of reducing in the backward."""
    states = []
    for word in ("backward", "step"):
        run = Run(rank, {**options, "reduce_grads": word})
        for _ in range(3):
            run.call(run.batch()).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            run.optimizer.step()
            run.optimizer.zero_grad()
        states.append(zinf_compile.full_state_dict(run.model))
    assert same_state(*states)


def sent_and_received(rank: int, size: int, options: dict[str, Any], backwards: int) -> tuple[int, int, int]:
    """Return what a step sends and receives, and the most bytes of gradients that were there."""
    run = Run(rank, options, Plain)
    for _ in range(2):
        for _ in range(backwards):
            run.call(run.batch().requires_grad_()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    found = zinf_compile.stats(run.model)
    links = found["links"]
    moved = (links[way]["bytes_last_step"] for way in ("to ranks", "from ranks"))
    return *moved, found["memory"]["device"]["peak_last_step"]["grads"]  # type: ignore[return-value]


def read_between(rank: int, size: int) -> None:
    """Read gradients between backwards, change them, and keep them: each is what its backward or backwards gave."""
    run = Run(rank, AT_STEP, Plain)
    whole = Whole(run)
    weight, name = run.model.layers[0].weight, "layers.0.weight"
    batches = [run.batch() for _ in range(4)]

    def backward(number: int) -> None:
        for call in (run.call, whole.call):
            call(batches[number]).backward()
        whole.add()

    backward(0)
    first = whole.averages(size)
    mine = {key: p.grad for key, p in run.model.named_parameters()}
    assert all(torch.equal(mine[key].full_tensor(), first[key]) for key in first)
    version = weight.grad._version
    for number in (1, 2):  # what is reduced already stays so: further ones are reduced to be added
        backward(number)
        first = {key: first[key] + more for key, more in whole.averages(size).items()}
    assert weight.grad is mine[name]
    assert weight.grad._version > version
    assert all(torch.equal(mine[key].full_tensor(), first[key]) for key in first)

    run.model.zero_grad()
    backward(0)
    held = weight.grad if rank == 0 else None  # on one rank alone, for a log
    run.model.zero_grad()
    (alone,) = torch.autograd.grad(run.call(batches[3]), [weight])
    whole.call(batches[3]).backward()
    whole.sums.clear()
    whole.add()
    expected = whole.sums[name]
    backward(1)
    weight.grad += alone
    alone *= 2
    assert torch.equal(weight.grad.full_tensor(), whole.averages(size)[name])
    whole.sums[name] = expected
    assert torch.equal(alone.full_tensor(), whole.averages(size)[name] * 2)
    del held


def onto_zeros(rank: int, size: int) -> int:
    """Keep gradients as objects, and set them to zero, reduced or not: what follows is whole again. Returns the bytes sent."""
    run = Run(rank, AT_STEP, Plain)
    whole = Whole(run)
    for dropped in (0, 2, 0):
        for number in range(2 + dropped):
            batch = run.batch()
            run.call(batch).backward()
            if number < dropped:
                run.model.zero_grad(set_to_none=False)
                continue
            whole.call(batch).backward()
            whole.add()
        expected = whole.averages(size)
        kept = dict(run.model.named_parameters())
        assert all(torch.equal(kept[name].grad.full_tensor(), value) for name, value in expected.items())
        run.model.zero_grad(set_to_none=False)
        assert not any(parameter.grad.full_tensor().any() for parameter in run.model.parameters())
        run.model.zero_grad(set_to_none=False)
    return int(zinf_compile.stats(run.model)["links"]["to ranks"]["bytes"])


def backwards_without_a_step(rank: int, size: int) -> int:
    """Return what ranks send where gradients are dropped unread."""
    run = Run(rank, AT_STEP, Plain)
    for _ in range(3):
        run.call(run.batch()).backward()
        run.optimizer.zero_grad()
    return int(zinf_compile.stats(run.model)["links"]["to ranks"]["bytes"])


def in_tiles(rank: int, size: int) -> None:
    """Train with a parameter in tiles, whose gradient is reduced in each backward, beside others: as if each were."""
    states = []
    for word in ("backward", "step"):
        torch.manual_seed(0)
        run = Run(rank, {"tile": "2KiB", "reduce_grads": word}, Plain)
        for _ in range(2):
            run.call(run.batch()).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        states.append(zinf_compile.full_state_dict(run.model))
    assert same_state(*states)


def least_cap(rank: int, size: int) -> tuple[int, int]:
    """Return the least caps that are named for either place; train with the second."""
    least = []
    for word in ("backward", "step"):
        options = {"tile": "1MiB", "reduce_grads": word}
        least.append(least_cap_of(rank, options, Plain))
        run = Run(rank, {**options, "device_memory": least[-1]}, Plain)
        run.call(run.batch()).backward()
        run.optimizer.step()
        assert zinf_compile.stats(run.model)["memory"]["device"]["peak"]["all"] <= least[-1]
    return least[0], least[1]


def contradictions(rank: int, size: int) -> None:
    """Other words for gradients that are partitioned already, and a graph of another model, are refused by name."""
    run = Run(rank, AT_STEP, Plain)
    run.call(run.batch()).sum().backward()
    again = torch.compile(run.model, backend="zero_infinity", options={"compute": "fx", "reduce_grads": "backward"})
    with pytest.raises(OptionError, match=r"reduce_grads='backward', but parameter .* with reduce_grads='step'"):
        again(run.batch(2))

    torch.compiler.reset()
    zinf_compile.reset()
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
    zinf_compile.partition(layers[0], reduce_grads="step")
    zinf_compile.partition(layers[1])
    shared: Any = torch.compile(lambda model, x: model(x), backend="zero_infinity", options={"compute": "fx"})
    shared(layers[0], run.batch()).sum().backward()
    with pytest.raises(PartitionedParameterError, match="reduce_grads='backward', but this graph was compiled otherwise"):
        shared(layers[1], run.batch())
