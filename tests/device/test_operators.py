"""Operators give the bits of the CPU: by its own kernels, whatever they are composed of elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import late
import pytest
import torch
import torch.nn.functional as F


def _pairs(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    host = [tensor.clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    return host, [tensor.detach().to("late").requires_grad_(tensor.requires_grad) for tensor in tensors]


X = torch.linspace(-2, 3, 60).reshape(3, 4, 5)
W = torch.linspace(-1, 1, 35).reshape(7, 5)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 9 * 9).reshape(2, 3, 9, 9)
INDEX = torch.tensor([2, 0, 1, 0])

CASES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "arithmetic": (lambda x: (x + 1) * 2 - x / 3 + x**2, (X,)),
    "in place": (lambda x: x.add_(1).mul_(2).clamp_(min=0).sub_(x), (X.clone(),)),
    "out": (lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)), (X,)),
    "comparison and where": (lambda x: torch.where(x > 0, x, -x), (X,)),
    "reductions": (lambda x: (x.sum(1), x.mean(), x.max(2), x.argmax(), x.std(0), x.norm()), (X,)),
    "views": (
        lambda x: (x.view(12, 5).t()[1:], x.unfold(2, 3, 1), x.transpose(0, 2).reshape(-1), x.diagonal(), x.split(2, 1)),
        (X,),
    ),
    "shapes": (
        lambda x: (
            torch.cat([x, x], 1),
            torch.stack([x, x]),
            x.flip(0),
            x.roll(1, 2),
            x.repeat(1, 2, 1),
            x.permute(2, 0, 1).contiguous(),
        ),
        (X,),
    ),
    "sorting": (lambda x: (x.sort(-1, descending=True), x.topk(2), x.cumsum(1)), (X,)),
    "matrices": (lambda x, w: (x @ w.t(), F.linear(x, w), torch.einsum("abc,dc->abd", x, w), torch.bmm(x, x.mT)), (X, W)),
    "indexing": (
        lambda x, i: (x[:, i], x.index_select(1, i), x[x > 0], x.gather(1, i[None, :, None].expand(3, 4, 5))),
        (X, INDEX),
    ),
    "writing by index": (
        lambda x, i: (
            x.index_put_((i % 3,), x[i % 3] + 1),
            x.index_add(1, i, x),
            x.scatter(1, i[None, :, None], 9.0),
            x.masked_fill(x > 1, 0),
        ),
        (X.clone(), INDEX),
    ),
    "activations": (lambda x: (F.gelu(x), F.relu(x), F.silu(x), F.softmax(x, -1), F.log_softmax(x, -1), torch.tanh(x)), (X,)),
    "norms": (lambda x: (F.layer_norm(x, [5]), F.rms_norm(x, [5]), F.normalize(x)), (X,)),
    "convolution": (
        lambda x: (
            F.conv2d(x, x[:, :, :3, :3].contiguous(), padding=1),
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 2),
            F.interpolate(x, scale_factor=2.0),
        ),
        (IMAGE,),
    ),
    "batch norm": (lambda x: F.batch_norm(x, x[0, :, 0, 0].clone(), x[0, :, 1, 1].abs().clone(), training=True), (IMAGE,)),
    "types": (lambda x: (x.to(torch.bfloat16), x.half().float(), x.long(), x.bool(), x.double().sum()), (X,)),
    "complex": (lambda x: (torch.fft.rfft(x).abs(), torch.view_as_real(torch.fft.fft(x).conj() * 2)), (X,)),
    "foreach": (
        lambda x, w: (
            torch._foreach_add([x, w], 1.0),
            torch._foreach_norm([x, w]),
            torch._foreach_mul([x, w], [w.sum(), w.sum()]),
        ),
        (X, W),
    ),
    "no shapes known": (
        lambda x: (x.cummax(1), torch.geqrf(x[0]), F.batch_norm(x, x[0, :, 0].clone(), x[0, :, 1].abs().clone())),
        (X,),
    ),
    "linear algebra": (torch.linalg.svdvals, (W,)),
    "dynamic sizes": (
        lambda x: (
            x.nonzero(),
            x.unique(),
            torch.masked_select(x, x > 0),
            torch.nonzero(x, out=torch.empty(0, device=x.device, dtype=torch.long)),
        ),
        (X,),
    ),
    "scalars of the host": (
        lambda x: (x * torch.tensor(2.0), x + torch.tensor(1), x.add_(torch.tensor(2.0, dtype=torch.float64))),
        (X.clone(),),
    ),
    "indices of the host": (lambda x: (x[torch.tensor([0, 2])], x[:, [1, 3]]), (X,)),
    "empty": (lambda x: (x[:0] @ x[0, 0], x[:0].sum(), torch.cat([x[:0], x])), (X,)),
}


def _same(host: object, there: object) -> bool:
    if isinstance(host, torch.Tensor):
        assert isinstance(there, torch.Tensor)
        assert there.device.type == "late"
        back = there.cpu()
        assert (back.dtype, back.shape) == (host.dtype, host.shape)
        return (
            torch.equal(back.reshape(-1).view(torch.uint8), host.reshape(-1).view(torch.uint8))
            if host.dim()
            else back.equal(host)
        )
    assert isinstance(host, list | tuple)
    assert isinstance(there, list | tuple)
    return len(host) == len(there) and all(_same(a, b) for a, b in zip(host, there, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_operators_give_the_bits_of_the_cpu(case: str) -> None:
    operator, tensors = CASES[case]
    host, there = _pairs(*tensors)
    with late.delays(0.0005, seed=5, chance=0.5):
        assert _same(operator(*host), operator(*there))
        for a, b in zip(host, there, strict=True):
            assert _same(a, b)
    assert not late.defects()


@pytest.mark.parametrize("mask", [False, True])
def test_attention_takes_the_kernel_of_the_cpu(mask: bool) -> None:
    query = torch.linspace(-1, 1, 2 * 4 * 6 * 8).reshape(2, 4, 6, 8).requires_grad_()
    bias = torch.zeros(6, 6).triu(1).mul_(-1e4) if mask else None
    results = []
    for q in (query, query.detach().to("late").requires_grad_()):
        out = F.scaled_dot_product_attention(
            q, q, q, attn_mask=bias.to(q.device) if bias is not None else None, is_causal=not mask
        )
        out.square().sum().backward()
        results.append((out.detach().cpu(), q.grad.cpu()))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in [work.name for work in late.log()]


RANDOM: dict[str, Callable[[torch.device], object]] = {
    "rand": lambda d: torch.rand(7, 3, device=d),
    "randn": lambda d: torch.randn(100, device=d),
    "randint": lambda d: torch.randint(10, (20,), device=d),
    "randperm": lambda d: torch.randperm(20, device=d),
    "in place": lambda d: torch.empty(30, device=d).uniform_().exponential_().bernoulli_(0.3),
    "of a tensor": lambda d: (torch.bernoulli(torch.full((50,), 0.3, device=d)), torch.randn(3, device=d)),
    "multinomial": lambda d: (torch.multinomial(torch.arange(1.0, 9.0, device=d), 4), torch.randn(3, device=d)),
    "normal": lambda d: (torch.normal(torch.arange(5.0, device=d), torch.ones(5, device=d)), torch.randn(3, device=d)),
    "dropout": lambda d: (F.dropout(torch.ones(100, device=d), 0.1), torch.native_dropout(torch.ones(100, device=d), 0.1, True)),
    "init": lambda d: torch.nn.init.trunc_normal_(torch.empty(40, device=d), std=0.02),
}


@pytest.mark.parametrize("case", RANDOM)
def test_one_seed_gives_the_numbers_of_the_cpu(case: str) -> None:
    torch.manual_seed(5)
    host = [RANDOM[case](torch.device("cpu")) for _ in range(2)]
    torch.manual_seed(5)
    there = [RANDOM[case](torch.device("late")) for _ in range(2)]
    assert _same(host, there)


def test_generators() -> None:
    generator = torch.Generator("late").manual_seed(3)
    state = generator.get_state()
    first = torch.randn(5, device="late", generator=generator)
    generator.set_state(state)
    assert torch.randn(5, device="late", generator=generator).equal(first)
    assert first.cpu().equal(torch.randn(5, generator=torch.Generator().manual_seed(3)))
    torch.late.manual_seed(3)
    state = torch.late.get_rng_state()
    assert torch.randn(5, device="late").equal(first)
    torch.late.set_rng_state(state)
    assert torch.randn(5, device="late").equal(first)
    with pytest.raises(ValueError, match="Expected a 'late' device type for generator"):
        torch.randn(5, device="late", generator=torch.Generator())


def test_random_numbers_wait_for_nobody() -> None:
    with late.held():
        torch.rand(10, device="late").bernoulli_(torch.full((10,), 0.5, device="late"))
        torch.late.get_rng_state()
    assert late.counters()["host waits"] == 0


def test_tensors_of_the_host_are_refused() -> None:
    there = torch.ones(3, device="late")
    for operator in (
        lambda: there + torch.ones(3),
        lambda: torch.ones(3).add_(there),
        lambda: torch.mm(there[None], torch.ones(3, 1)),
    ):
        with pytest.raises(RuntimeError, match=r"same device|two devices"):
            operator()


def test_shapes_are_checked_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="late") + torch.ones(4, device="late")


def test_operators_of_others_are_not_run_by_cpu_kernels() -> None:
    library = torch.library.Library("late_tests", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(NotImplementedError, match="late_tests::twice has no kernel for device late"):
        torch.ops.late_tests.twice(torch.ones(3, device="late"))


def test_saving_copying_and_printing(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2, device="late")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    assert loaded["weight"].device.type == "late"
    assert loaded["weight"].equal(model.weight)
    assert torch.load(tmp_path / "model.pt", map_location="cpu")["weight"].equal(model.weight.cpu())
    assert copy.deepcopy(model).weight.equal(model.weight)
    assert "device='late:0'" in repr(torch.ones(2, device="late"))
