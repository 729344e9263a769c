"""Option `reduce_dtype`: the type in which gradients are summed over ranks and micro-batches and kept until the step."""

from __future__ import annotations

import copy
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_reduce_dtype import (
    EVERYWHERE,
    ROWS,
    SMALL,
    SMALL_PIECES,
    Weights,
    all_of_it,
    assert_trained_alike,
    build,
    by_hand,
    compiled_run,
    smallest_cap,
    table,
)
from ranks import run_ranks
from tiers import compiled, context_of, words
from torch import nn

import zinf_compile
from zinf_compile.cli.main import schedule_hash
from zinf_compile.cli.trace import trace
from zinf_compile.errors import OptionError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.gradient import ShardedGradient

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
ROUNDED = pytest.mark.filterwarnings("ignore:all .* parameters are torch.bfloat16 and updated in that precision")


@pytest.mark.parametrize("micro_batches", [3, more(1)])
def test_the_numbers_of_a_loop_that_adds_up_in_fp32(micro_batches: int, tmp_path: Path) -> None:
    """Tied, frozen, tiled parameters, one without dimensions; gradients clipped, kept zeroed, and anywhere."""
    assert table(0, 1, str(tmp_path), ROWS, [micro_batches]) == len(ROWS)


@pytest.mark.distributed
def test_on_two_ranks(tmp_path: Path) -> None:
    for count, sent in run_ranks(all_of_it, 2, str(tmp_path)):
        assert count == 2
        assert sent == [8 * 4], "the other rank's part of 15 elements, padded, in fp32"


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(table, ranks, str(tmp_path), ROWS, [1, 3]) == [2 * len(ROWS)] * ranks


@pytest.mark.parametrize("away", [{}, EVERYWHERE], ids=lambda away: "+".join(away) or "none")
def test_caps_hold_with_gradients_in_fp32(away: dict[str, Any], tmp_path: Path) -> None:
    """What is held stays within the smallest cap that is named; the one of gradients in bf16 is smaller."""
    options = {**away, "nvme": tmp_path} if away else {}
    wide, narrow = (smallest_cap({**options, "reduce_dtype": dtype}, 0) for dtype in ("float32", "bfloat16"))
    assert wide > narrow


def test_gradients_take_four_bytes_an_element_and_the_first_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zinf_compile")
    model = compiled(build(), {"master": "float32"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = model(words(0, 0))
    before = context_of(model).memory.ledger.now()["grads"]  # of other models
    loss.backward()
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert context_of(model).memory.ledger.now()["grads"] - before == 4 * numel
    optimizer.step()
    assert f"gradients on the device ({4 * numel:,} B)" in caplog.text


@ROUNDED
def test_without_a_master_copy_the_step_rounds_once() -> None:
    """Of what was added up in fp32; by default it is added up in bf16, as eager does."""
    found = {}
    for dtype in (None, "float32"):
        torch.compiler.reset()
        model = compiled(Weights().bfloat16(), {"reduce_dtype": dtype})
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1.0)  # by g / (g + 1)
        for x in (1.0, *[2.0**-9] * 4):
            model(torch.full((3, 5), x, dtype=torch.bfloat16)).backward()
        optimizer.step()
        found[dtype] = model.weight.unique().tolist()
    assert found == {None: [0.5], "float32": [0.5 - 2.0**-9]}


def test_a_narrower_type_is_taken_at_the_users_word() -> None:
    """bf16 for fp32 parameters: half the bytes, fewer digits; an optimizer's step sees fp32."""
    model = compiled(Weights(), {"reduce_dtype": torch.bfloat16})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for x in (1.0, SMALL):
        model(torch.full((3, 5), x)).backward()
    grad = model.weight.grad
    assert isinstance(grad, ShardedGradient)
    assert (grad.dtype, grad.kept_dtype, grad.norm_dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert grad.full_tensor().unique().tolist() == [1.0]
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].dtype == torch.float32
    assert model.weight.unique().tolist() == [0.0]


def saved_and_listed(grad: torch.Tensor) -> dict[str, Any]:
    """Return what a gradient in memory becomes elsewhere."""
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    return {"saved": torch.load(file, weights_only=True), "list": torch.tensor(grad.tolist())}


def read(grad: torch.Tensor) -> dict[str, Any]:
    """Return what user code may make of a gradient of 3 by 5."""
    return {
        "twice": grad * 2,
        "absolute": grad.abs(),
        "in fp32": grad.float(),
        "with a tensor": torch.lerp(grad, torch.ones_like(grad), 0.25),
        "with a whole one": grad + torch.ones(grad.shape, dtype=grad.dtype),
        "with a wider one": grad + torch.ones(grad.shape),
        "with one element": torch.lerp(grad, torch.ones(1, 1, dtype=grad.dtype), 0.25),
        "with a row": torch.lerp(grad, torch.ones(5, dtype=grad.dtype), 0.25),
        "with a wider row": grad * torch.full((5,), 1.5),
        "like it": torch.zeros_like(grad),
        "foreach": torch._foreach_mul([grad], 2.0)[0],
        "product": grad @ torch.ones(5, dtype=grad.dtype),
        "sum": grad.sum(),
    }


def test_what_is_made_of_a_gradient_has_the_types_that_eager_gives(tmp_path: Path) -> None:
    eager = Weights().bfloat16()
    for options in ({}, {"grads": "nvme", "nvme": tmp_path, **SMALL_PIECES}):
        torch.compiler.reset()
        ours = compiled(copy.deepcopy(eager), {"master": "float32", **options})
        x = torch.arange(15.0).view(3, 5).bfloat16()
        results = []
        for model in (eager, ours):
            model.weight.grad = None
            model(x).backward()
            results.append(read(model.weight.grad) | ({} if options else saved_and_listed(model.weight.grad)))
        for name, expected in results[0].items():
            found = results[1][name]
            found = found.full_tensor() if isinstance(found, ShardedGradient) else found
            assert found.dtype == expected.dtype, name
            assert torch.equal(found, expected), name


def test_writing_to_parts_of_a_gradient_reaches_it_and_keeps_the_digits_of_the_rest() -> None:
    model = compiled(Weights().bfloat16(), {"master": "float32"})
    for x in (1.0, SMALL):
        model(torch.full((3, 5), x, dtype=torch.bfloat16)).backward()
    grad = model.weight.grad
    grad[0] = 3
    grad[torch.tensor([False, True, False])] = 2
    grad.index_fill_(1, torch.tensor([4]), 7)
    grad.index_add_(1, torch.tensor([3]), torch.ones(3, 1, dtype=torch.bfloat16))
    expected = torch.tensor([[3, 3, 3, 4, 7], [2, 2, 2, 3, 7], [1, 1, 1, 2, 7]])
    expected = expected + torch.tensor([[0.0], [0.0], [SMALL]]) * torch.tensor([1.0, 1, 1, 1, 0])
    assert torch.equal(grad.float().full_tensor(), expected)


def test_two_graphs_contribute_to_one_parameter() -> None:
    """Tied over a graph break: autograd adds what comes from two graphs, in fp32; within one graph it adds as eager does."""

    class Broken(Weights):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = super().forward(x)
            torch._dynamo.graph_break()
            return first + super().forward(x * SMALL)

    model = compiled(Broken().bfloat16(), {"master": "float32"})
    model(torch.ones(3, 5, dtype=torch.bfloat16)).backward()
    assert model.weight.grad.float().full_tensor().unique().tolist() == [1 + SMALL]


def test_a_loss_in_chunks() -> None:
    """Chunks are added up within the graph; what that gives is cast, whatever the number of micro-batches."""
    options = {"compute": "fx", "master": "float32", "chunk_loss": True}
    expected = [compiled_run(0, 1, count, options).gradients for count in (1, 1)]
    assert expected[0][0]["embedding.weight"].dtype == torch.float32
    model = compiled(build(), options)
    sums: dict[str, torch.Tensor] = {}
    for micro in range(2):
        model(words(0, micro)).backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                one = p.grad.full_tensor()  # type: ignore[union-attr]
                assert torch.equal(one.float(), p.grad.float().full_tensor()), "what a graph gives in bf16"  # type: ignore[union-attr]
                sums[name] = sums.get(name, 0) + one.float()
                p.grad = None
    for micro in range(2):
        model(words(0, micro)).backward()
    for name, total in sums.items():
        assert torch.equal(model.get_parameter(name).grad.float().full_tensor(), total), name  # type: ignore[union-attr]


def test_inductor_reduces_in_fp32_too() -> None:
    model = compiled(Weights().bfloat16(), {"master": "float32", "compute": "inductor"})
    for x in (1.0, SMALL):
        model(torch.full((3, 5), x, dtype=torch.bfloat16)).backward()
    assert model.weight.grad.float().full_tensor().unique().tolist() == [1 + SMALL]


def short_mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return what `zinf dump` takes: bf16, but for a bias in fp32."""
    layers = [nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((24, 48), (48, 12))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.bias = model, nn.Parameter(torch.zeros(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x) + self.bias
            return out

    return Called(), torch.zeros(5, 24, dtype=torch.bfloat16)


def test_the_dump_shows_the_type_on_the_wire_and_its_bytes() -> None:
    options = {"compute": "fx", "bucket": "4KiB", "grads": "nvme", "nvme": "/no/such/folder"}
    plain, wide = (trace(short_mlp, options={**options, **others}, world_size=4) for others in ({}, {"master": "float32"}))
    assert schedule_hash(plain) != schedule_hash(wide)
    backward = wide[1]
    shown = re.findall(r"reduce_scatter\((.*)\) +# (\S+) ([\d,]+) B", backward.text)
    assert {(name, size) for _, name, size in shown} == {
        ("layers.0.weight", "4,608"),
        ("layers.2.weight", "2,304"),
        ("bias", "48"),
    }
    assert {name: "dtype=torch.float32" in arguments for arguments, name, _ in shown} == {
        "layers.0.weight": True,
        "layers.2.weight": True,
        "bias": False,  # is in fp32 itself, and goes with the others
    }
    reductions = [c for c in backward.collectives if c.operator == "reduce_scatter"]
    assert {(c.unit.name, c.dtype, c.bytes, c.moved) for c in reductions} == {
        ("layers.0.weight", torch.float32, 4608, 3 * 1152),
        ("layers.2.weight", torch.float32, 2304, 3 * 576),
        ("bias", torch.float32, 48, 3 * 12),
    }
    assert len({c.group for c in reductions}) == 2, "buckets of 4 KiB are filled by what travels"
    assert {(s.unit.name, s.moved) for s in backward.swaps} == {("layers.0.weight", 1152), ("layers.2.weight", 576), ("bias", 12)}
    assert "[48, 24] bfloat16 as float32" in "\n".join(backward.program.sequence)


@pytest.mark.parametrize("given", ["float23", 32, "int32", torch.int8, True])
def test_what_is_no_type_is_refused(given: object) -> None:
    with pytest.raises(OptionError, match=r"option reduce_dtype=.* accepted: torch.float32, .*torch.float64, or their names"):
        compiled(Weights(), {"reduce_dtype": given})(torch.ones(3, 5))


@ROUNDED
def test_graphs_compiled_later_follow_what_a_model_was_partitioned_with() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3).bfloat16()
    zinf_compile.partition(model, reduce_dtype="float32")
    later = nn.Sequential(model)
    call = torch.compile(lambda x: later(x).float().square().sum(), backend="zero_infinity", options={"compute": "fx"})
    call(torch.ones(2, 4, dtype=torch.bfloat16)).backward()
    assert model.weight.grad.kept_dtype == torch.float32
    torch.compiler.reset()
    options = {"compute": "fx", "reduce_dtype": "bfloat16"}
    other = torch.compile(lambda x: later(x).float().sum(), backend="zero_infinity", options=options)
    with pytest.raises(OptionError, match=r"reduce_dtype='bfloat16', but parameter .* with reduce_dtype=torch.float32"):
        other(torch.ones(2, 4, dtype=torch.bfloat16))


def test_the_name_of_the_default_is_no_contradiction() -> None:
    with torch.device("meta"):
        model = Weights().bfloat16()
    zinf_compile.partition(model, master="float32", init=lambda module: nn.init.ones_(module.weight))
    compiled(model, {"reduce_dtype": "float32"})(torch.ones(3, 5, dtype=torch.bfloat16)).backward()
    assert model.weight.grad.kept_dtype == torch.float32


def test_late_steps_and_device_copies_take_the_gradient_unrounded(tmp_path: Path) -> None:
    """The bits of a step that ends during the next forward are those of one that doesn't; bytes are in test_tiers.py."""
    expected = by_hand(0, 1, 2, {})
    for update in ("host", "device"):
        with simulating(SimulatedDevice()):
            options = {**EVERYWHERE, "nvme": tmp_path, "update": update}
            assert_trained_alike(compiled_run(0, 1, 2, options), expected, update)
