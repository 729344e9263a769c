"""Losses in chunks through the whole compiler, beside eager PyTorch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capturing import capturing_backend
from losses import CLASSES, HIDDEN, LEFT_ALONE, LOSSES, Head, assert_within, batch, exact
from marks import more
from near import train_near_eager
from rank_chunk_loss import compare_on_a_rank
from ranks import run_ranks
from torch import fx, nn
from torch.nn import functional as F
from training import whole_gradient
from transformer_models import TRANSFORMERS, llama, qwen2

import zinf_compile
from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.cli.models import GPT
from zinf_compile.cli.trace import trace
from zinf_compile.config import Config
from zinf_compile.errors import OptionError
from zinf_compile.ir.compute_ops import take_scaled
from zinf_compile.ir.program import Program

BOTH = pytest.mark.parametrize("compute", ["fx", "inductor"])


TOKENS_A_CHUNK = 8
IN_CHUNKS = {"chunk_bytes": 4 * CLASSES * TOKENS_A_CHUNK}
"""Three chunks of a batch's 21 tokens, the last one shorter."""


def compiled(model: nn.Module, compute: str, **options: Any) -> Any:
    """Compile in place with losses in chunks."""
    torch.compiler.reset()
    given = {"compute": compute, "chunk_loss": True, "compute_shape": IN_CHUNKS, **options}
    return torch.compile(model, backend="zero_infinity", options=given)


def assert_head_within(head: Head, compute: str, x: torch.Tensor, targets: torch.Tensor) -> None:
    """Compare loss and gradients with fp64, within the bound for any order of summation."""
    reference = exact(head, x, targets)
    x = x.clone().requires_grad_()
    loss = compiled(head, compute)(x, targets)
    loss.backward()
    assert x.grad is not None
    found = [loss, x.grad, *(whole_gradient(p) for p in head.parameters())]
    for what, value, expected, bound in zip(
        ("loss", "hidden", "weight", "bias"), found, reference.values, reference.bounds, strict=False
    ):
        assert_within(what, value, expected, bound)


@pytest.mark.parametrize("name", LOSSES)
def test_all_losses_operator_by_operator(name: str) -> None:
    assert_head_within(Head(LOSSES[name], bias=name in ("mean", "shifted")), "fx", *batch())


@pytest.mark.parametrize("name", ["ignored_class", "weighted_smoothed", "capped", "classes_in_the_middle", "masked_by_hand"])
def test_losses_through_inductor(name: str) -> None:
    assert_head_within(Head(LOSSES[name], bias=True), "inductor", *batch())


def tiny_gpt() -> nn.Module:
    """Return a GPT whose head is its embedding."""
    return GPT(layers=2, width=20, heads=2, vocabulary=CLASSES, length=17)


def words(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, some of them ignored."""
    tokens, targets = torch.randint(CLASSES, (2, 2, 17), generator=torch.Generator().manual_seed(seed))
    return tokens, targets.masked_fill(targets < 3, -100)


@BOTH
def test_a_tied_head_trains_as_eager_does(compute: str) -> None:
    train_near_eager(tiny_gpt, [words(step) for step in range(3)], compute=compute, chunk_loss=True)


def test_a_head_alone_in_its_graph_is_gathered_once_for_all_chunks() -> None:
    programs: list[Program] = []
    model = Head(LOSSES["mean"])
    x, targets = batch()
    torch.compile(model, backend=capturing_backend(programs, {"chunk_loss": True}))(x.requires_grad_(), targets).backward()
    gathered = [[line.split()[0] for line in program.sequence] for program in programs]
    assert gathered == [["all_gather"], ["reduce_scatter"]], "the backward has no use for the head"


@BOTH
def test_no_gradients(compute: str) -> None:
    head, (x, targets) = Head(LOSSES["smoothed"]), batch()
    expected = exact(head, x, targets)
    call = compiled(head, compute)
    with torch.no_grad():
        assert_within("loss", call(x, targets), expected.values[0], expected.bounds[0])


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    head, (x, targets) = Head(LOSSES["mean"]), batch()
    reference = exact(head, x, targets)
    head.head.weight.requires_grad_(frozen != "head")
    x = x.clone().requires_grad_(frozen != "hidden")
    loss = compiled(head, "fx")(x, targets)
    loss.backward()
    if frozen == "head":
        assert head.head.weight.grad is None
        assert x.grad is not None
        assert_within("hidden", x.grad, reference.values[1], reference.bounds[1])
    else:
        assert x.grad is None
        assert_within("weight", whole_gradient(head.head.weight), reference.values[2], reference.bounds[2])


@BOTH
def test_backward_twice_scaled_and_accumulated(compute: str) -> None:
    head, (x, targets) = Head(LOSSES["mean"]), batch()
    reference = exact(head, x, targets)
    call = compiled(head, compute)
    loss = call(x, targets)
    loss.backward(retain_graph=True)
    first = whole_gradient(head.head.weight).clone()
    assert_within("once", first, reference.values[2], reference.bounds[2])
    (loss * 1024).backward(retain_graph=True)  # as a GradScaler does
    assert torch.equal(whole_gradient(head.head.weight), first + 1024 * first)
    loss.backward()
    assert torch.equal(whole_gradient(head.head.weight), first + 1024 * first + first)
    (call(x, targets) / 2).backward()  # of another forward
    assert torch.equal(whole_gradient(head.head.weight), first + 1024 * first + first + first / 2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_given_for_the_loss_don_t_change_a_second_backward() -> None:
    head, (x, targets) = Head(LOSSES["sum"]), batch()
    loss = compiled(head, "fx")(x.requires_grad_(), targets)
    grads = [torch.autograd.grad(loss, x, torch.tensor(factor), retain_graph=True)[0] for factor in (4.0, 1.0)]
    assert torch.equal(grads[0], 4 * grads[1])


@BOTH
def test_a_target_that_is_no_class_raises_as_in_eager(compute: str) -> None:
    head, (x, targets) = Head(LOSSES["mean"]), batch()
    call = compiled(head, compute)
    call(x, targets)
    for target in (CLASSES, -1, -101):
        targets[1, 2] = target
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            head(x, targets)
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds: the loss has classes 0 to {CLASSES - 1}"):
            call(x, targets)
        targets[1, 2] = 0
        call(x, targets)


def test_targets_that_are_all_ignored() -> None:
    head, (x, targets) = Head(LOSSES["mean"]), batch()
    x = x.requires_grad_()
    loss = compiled(head, "fx")(x, torch.full_like(targets, -100))
    loss.backward()
    assert loss.isnan()
    assert x.grad is not None
    assert not x.grad.any()


def test_an_empty_batch_is_what_eager_makes_of_it() -> None:
    head = Head(LOSSES["mean"])
    x, targets = torch.empty(0, 7, HIDDEN), torch.empty(0, 7, dtype=torch.long)
    loss = compiled(head, "fx")(x, targets)
    assert loss.isnan()
    assert head(x, targets).isnan()


def test_batches_of_several_sizes() -> None:
    head = Head(LOSSES["mean"])
    call = compiled(head, "fx")
    for rows in (3, 2, 4):
        x, targets = torch.randn(rows, 7, HIDDEN), torch.randint(CLASSES, (rows, 7))
        expected = exact(head, x, targets)
        with torch.no_grad():
            assert_within("loss", call(x, targets), expected.values[0], expected.bounds[0])


@BOTH
def test_a_number_of_tokens_that_is_known_at_run_time_only_leaves_the_loss_whole(
    compute: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = Head(LOSSES["capped"], bias=True)
    torch.compiler.reset()
    options = {"compute": compute, "chunk_loss": True, "compute_shape": IN_CHUNKS}
    call = torch.compile(head, backend="zero_infinity", options=options, dynamic=True)
    with caplog.at_level(logging.INFO, "zinf_compile"):
        for rows in (3, 2, 5):
            head.zero_grad()
            x, targets = torch.randn(rows, 7, HIDDEN), torch.randint(CLASSES, (rows, 7))
            reference = exact(head, x, targets)
            loss = call(x, targets)
            loss.backward()
            assert_within("loss", loss, reference.values[0], reference.bounds[0])
            assert_within("weight", whole_gradient(head.head.weight), reference.values[2], reference.bounds[2])
    assert caplog.text.count("its number of tokens is dynamic") == 1, "one graph serves all"


@BOTH
def test_autocast_and_half_precision_are_as_near_as_eager(compute: str) -> None:
    """Compare errors against fp64. A weight's gradient is rounded to 16 bits in each chunk, and where the weight is of 16 bits
    once more as a sum, which in between is in fp32: two roundings of the size of eager's one."""
    for autocast in (True, False):
        torch.manual_seed(3)
        head = Head(lambda z, y: F.cross_entropy(z.float().flatten(0, 1), y.flatten()))
        x, targets = batch()
        if not autocast:
            head, x = head.bfloat16(), x.bfloat16()
        reference = exact(_in_double(head), x, targets)
        errors = []
        for model in (copy.deepcopy(head), compiled(head, compute)):
            inputs = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(inputs, targets)
            loss.backward()
            assert inputs.grad is not None
            weight = model.head.weight if isinstance(model, Head) else head.head.weight
            found = [loss, inputs.grad, whole_gradient(weight)]
            errors.append([float((a.detach().double() - b).norm()) for a, b in zip(found, reference.values, strict=True)])
        for eager, ours in zip(*errors, strict=True):
            assert ours <= 2 * eager


def _in_double(head: Head) -> Head:
    other = copy.deepcopy(head)
    other.loss = LOSSES["mean"]
    return other


@pytest.mark.parametrize(("name", "compute"), [("llama", "fx"), ("qwen2", "inductor"), more("t5", "fx")])
def test_models_of_transformers(name: str, compute: str, caplog: pytest.LogCaptureFixture) -> None:
    case = TRANSFORMERS[name]
    with caplog.at_level(logging.INFO, "zinf_compile"):
        train_near_eager(case.build, [case.batch(step, 0) for step in range(2)], compute=compute, chunk_loss=True)
    assert "chunk_loss leaves" not in caplog.text


@pytest.mark.parametrize("build", [llama, qwen2])
def test_models_that_return_logits_keep_them_bit_by_bit(build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    model = build().eval()
    tokens = torch.randint(61, (2, 13))
    expected = model(input_ids=tokens, labels=tokens)
    torch.compiler.reset()
    model.compile(backend="zero_infinity", options={"compute": "fx", "chunk_loss": True, "compute_shape": IN_CHUNKS})
    with caplog.at_level(logging.INFO, "zinf_compile"):
        found = model(input_ids=tokens, labels=tokens)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    assert "its logits are" in caplog.text


@pytest.mark.distributed
@pytest.mark.parametrize("compute", ["fx", more("inductor")])
def test_on_two_ranks(compute: str) -> None:
    assert run_ranks(compare_on_a_rank, 2, compute) == ["", ""]


@pytest.mark.parametrize("value", ["yes", 1, 0, 2.0])
def test_the_option_is_validated(value: object) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="accepted: True, False, or None for logits above 256 MiB"):
        torch.compile(model, backend="zero_infinity", options={"chunk_loss": value})(torch.randn(1, 2))


def test_where_states_live_changes_no_bit_and_no_chunk(tmp_path: Path) -> None:
    on_drive = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": tmp_path}
    found = []
    for placement in ({}, on_drive):
        torch.manual_seed(11)
        model = tiny_gpt()
        call = compiled(model, "fx", **placement)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            losses.append(call(*words(step)))
            losses[-1].backward()
            optimizer.step()
        found.append([*(loss.detach() for loss in losses), *zinf_compile.full_state_dict(model).values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_dump_shows_each_chunk_and_why_a_loss_is_left_alone() -> None:
    def target(loss: Any) -> Callable[[], tuple[nn.Module, Any]]:
        return lambda: (Head(loss), batch())

    options = {"chunk_loss": True, "compute_shape": IN_CHUNKS}
    text = trace(target(LOSSES["mean"]), options=options)[0].text
    chunks = [(start, min(start + TOKENS_A_CHUNK, 21)) for start in range(0, 21, TOKENS_A_CHUNK)]
    shown = [line.split("# ")[1] for line in text.splitlines() if "# logits" in line]
    assert shown == [f"logits of tokens {start} to {end} {4 * CLASSES * (end - start):,} B" for start, end in chunks]
    forward, backward = trace(target(LEFT_ALONE["logits returned"][0]), options=options)
    assert forward.text.startswith("# chunk_loss leaves _log_softmax as it is: its logits are returned (")
    assert "# chunk_loss" not in backward.text
    joint = trace(target(LOSSES["mean"]), options=options, after="chunk_loss")[0]
    assert "nll_loss_backward" in joint.before
    assert "nll_loss_backward" not in joint.text


@BOTH
def test_no_value_of_the_graphs_is_as_large_as_the_logits(compute: str) -> None:
    """Read it off the programs: no register and no value within a region holds a number for each token and class."""
    largest = []

    class Recorder(GraphCompiler):
        def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
            values = [node.meta.get("val") for node in graph.graph.nodes]
            largest.append(max(v.numel() for v in values if isinstance(v, torch.Tensor)))
            return super().schedule(graph, kind)

    head, (x, targets) = Head(LOSSES["weighted_smoothed"], bias=True), batch()
    settings = Config(compute=compute, chunk_loss=True, compute_shape=IN_CHUNKS)
    torch.compiler.reset()
    call = torch.compile(head, backend=lambda gm, inputs: Recorder(settings).compile(gm, inputs))
    call(x.requires_grad_(), targets).backward()
    assert len(largest) == 2
    assert max(largest) <= max(TOKENS_A_CHUNK * CLASSES, HIDDEN * CLASSES)
    assert max(TOKENS_A_CHUNK, HIDDEN) < x.shape[:-1].numel(), "a chunk and the head are smaller than the logits"


def test_the_gradient_of_the_head_is_not_copied_where_its_backward_runs_once() -> None:
    saved = torch.full((3, 2), 2.0)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return take_scaled(saved, grad)

    x = torch.zeros(3, 2, requires_grad=True)
    loss = Function.apply(x)
    (kept,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
    assert kept.data_ptr() != saved.data_ptr()
    assert torch.equal(saved, torch.full((3, 2), 2.0))
    (taken,) = torch.autograd.grad(loss, x, torch.tensor(3.0))
    assert taken.data_ptr() == saved.data_ptr()
    assert torch.equal(taken, torch.full((3, 2), 6.0))
    assert torch.equal(take_scaled(taken, torch.tensor(2.0)), torch.full((3, 2), 12.0)), "outside of a backward it copies"
    assert torch.equal(taken, torch.full((3, 2), 6.0))
