from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from irtext import copied, cut, example_of, graph_of, lines_of, results, text_of, unit
from torch import fx, nn
from torch.nn import functional as F
from tracing import joint_graph, traced

from zinf_compile.passes.analysis.region_facts import operations_of
from zinf_compile.passes.graph.node_facts import display_name, skipped_notes
from zinf_compile.passes.graph.token_loop import TokenLoop, is_token_loop
from zinf_compile.passes.tokens.tile_tokens import choose_tile, tile_tokens

WIDTH, HIDDEN, TILE = 4, 16, 8
TILE_BYTES = 4 * HIDDEN * TILE


def loops(gm: fx.GraphModule) -> list[TokenLoop]:
    return [node.target for node in gm.graph.nodes if is_token_loop(node)]


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, requires_grad=True)


class Mlp(nn.Module):
    """An MLP of a form of its own, `function(up, down)`."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu, *, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x if self.norm is None else self.norm(x))))


def test_the_example() -> None:
    before, after = example_of(tile_tokens)
    gm = graph_of("\n".join(before), x=torch.empty(20, 4), up=unit(16, 4), down=unit(4, 16))
    assert lines_of(text_of(tile_tokens(gm, tile_bytes=TILE_BYTES), loop_0="y", t_1="u")) == after


def test_the_slice_forward_and_backward() -> None:
    gm = tile_tokens(joint_graph(Mlp(norm=nn.LayerNorm(WIDTH)), tokens(2, 10)), tile_bytes=TILE_BYTES)
    forward, backward = loops(gm)
    assert list(forward.bodies) == [TILE, 20 % TILE]
    assert text_of(forward.body).splitlines() == [
        "native_layer_norm = native_layer_norm(rows_0, [4], whole_0, whole_1, 1e-05)",
        "getitem = native_layer_norm[0]",
        "view = view(getitem, [8, 4])",
        "addmm = addmm(whole_2, view, whole_3)",
        "view_1 = view(addmm, [1, 8, 16])",
        "gelu = gelu(view_1)",
        "view_2 = view(gelu, [8, 16])",
        "addmm_1 = addmm(whole_4, view_2, whole_5)",
        "return (addmm_1,)",
    ]
    lines = text_of(backward.body).splitlines()
    assert lines[:7] == [
        "native_layer_norm = native_layer_norm(rows_0, [4], whole_0, whole_1, 1e-05)",
        "getitem = native_layer_norm[0]",
        "getitem_1 = native_layer_norm[1]",
        "getitem_2 = native_layer_norm[2]",
        "view = view(getitem, [8, 4])",
        "addmm = addmm(whole_2, view, whole_3)",
        "view_1 = view(addmm, [1, 8, 16])",
    ]
    assert lines[9:] == [
        "mm = mm(rows_1, whole_4)",
        "t = t(rows_1)",
        "addmm_1 = addmm_(sum_0, t, view_2)",
        "view_3 = view(mm, [1, 8, 16])",
        "gelu_backward = gelu_backward(view_3, view_1)",
        "view_4 = view(gelu_backward, [8, 16])",
        "mm_1 = mm(view_4, whole_5)",
        "t_1 = t(view_4)",
        "addmm_2 = addmm_(sum_1, t_1, view)",
        "sum_2 = sum(view_4, [0], True)",
        "view_5 = view(mm_1, [1, 8, 4])",
        "native_layer_norm_backward = native_layer_norm_backward(view_5, rows_0, [4], getitem_1, getitem_2, whole_0, whole_1, "
        "[True, True, True])",
        "getitem_3 = native_layer_norm_backward[0]",
        "getitem_4 = native_layer_norm_backward[1]",
        "getitem_5 = native_layer_norm_backward[2]",
        "return (addmm_1, addmm_2, sum_2, getitem_3, getitem_4, getitem_5)",
    ]


class Gated(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Packed(Mlp):
    """Gate and value in one product; the second weight is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.turned = nn.Linear(WIDTH, 2 * HIDDEN), nn.Parameter(torch.randn(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return (F.silu(gate) * value) @ self.turned


class Sliced(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return (torch.tanh(both[..., :HIDDEN]) * both[..., HIDDEN:]) @ self.turned


class Adapted(Mlp):
    """Frozen, with trained matrices of low rank beside both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        sizes = {"a": (2, WIDTH), "b": (HIDDEN, 2), "c": (2, HIDDEN), "d": (WIDTH, 2)}
        self.low = nn.ParameterDict({name: nn.Parameter(torch.randn(*size)) for name, size in sizes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low
        h = F.gelu(self.up(x) + 0.5 * F.linear(F.linear(x, low["a"]), low["b"]))
        return x + self.down(h) + 0.5 * F.linear(F.linear(h, low["c"]), low["d"])


class Returned(Mlp):
    """Something narrow that is made inside is a result, too."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(HIDDEN, 2), nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(self.up(x))
        low = self.low(h)
        return self.down(h) + self.high(low), low


class Tied(Mlp):
    """One weight for both layers, and the whole MLP twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + F.linear(F.relu(self.up(x)), self.up.weight.t())
        return x


class Deep(Mlp):
    """Three layers between which nothing is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.middle(F.relu(self.up(x)))))


class Masked(Mlp):
    """A mask for the hidden values that is made of an input, and one of the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drop = torch.ones(*x.shape[:-1], HIDDEN).cumsum(-2) > 3
        return self.down(F.gelu(self.up(x)) * drop * (x[..., :1] > 0))


class Autocast(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer_{number}": layer for number, layer in enumerate(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (Mlp, 1),
    "with a norm": (lambda: Mlp(norm=nn.LayerNorm(WIDTH)), 1),
    "composite": (lambda: Mlp(lambda h: 0.5 * h * (1 + torch.tanh(h + 0.04 * h.pow(3)))), 1),
    "gated": (Gated, 1),
    "packed": (Packed, 1),
    "sliced": (Sliced, 1),
    "adapted": (Adapted, 1),
    "returned": (Returned, 1),
    "tied": (Tied, 2),
    "deep": (Deep, 1),
    "masked": (Masked, 1),
    "autocast": (Autocast, 1),
    "two": (lambda: Stack(Mlp(), Mlp(norm=nn.LayerNorm(WIDTH))), 2),
}


@pytest.mark.parametrize("shape", [(20,), (2, 10)], ids=["flat", "batch"])
@pytest.mark.parametrize("name", MODELS)
def test_same_numbers(name: str, shape: tuple[int, ...]) -> None:
    make, stretches = MODELS[name]
    gm = joint_graph(make(), tokens(*shape))
    before = results(copied(gm))
    after = tile_tokens(gm, tile_bytes=TILE_BYTES)
    after.graph.lint()
    assert not skipped_notes(after)
    assert len(loops(after)) == 2 * stretches
    for one, other in zip(before, results(after), strict=True):
        if isinstance(one, torch.Tensor):
            # bf16: up to 16 products below 16, each rounded to 2**-9 of itself
            torch.testing.assert_close(other, one, rtol=1e-4, atol=16 * 16 * 2**-9 if name == "autocast" else 1e-4)


def test_nothing_wide_is_whole_or_saved() -> None:
    for name, (make, _) in MODELS.items():
        gm = tile_tokens(joint_graph(make(), tokens(40)), tile_bytes=TILE_BYTES)
        wide = [n for n in gm.graph.nodes if n.op == "call_function" and _rows_and_width(n) == (40, HIDDEN)]
        made = [n.name for n in wide if n.target not in (torch.ops.aten.ones.default, torch.ops.aten.full.default)]
        assert not made or name == "masked", (name, made)  # the mask that isn't made of rows


def _rows_and_width(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def test_forward_bits_are_those_of_slices_and_gradients_are_within_the_order_of_sums() -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
    x = tokens(20)
    y = torch.randn(20, WIDTH)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = up, down

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x)))

    gm = tile_tokens(joint_graph(Plain(), x), tile_bytes=TILE_BYTES)
    values = {"up.weight": up.weight, "up.bias": up.bias, "down.weight": down.weight, "x": x}
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = [values[_name(n)] if not n.name.startswith("tangents") else y for n in inputs]
    with torch.no_grad():
        out, *grads = fx.Interpreter(gm).run(*[v.detach() for v in given], enable_io_processing=False)
    found = dict(zip([_name(n) for n in inputs if not n.name.startswith("tangents")], grads, strict=True))
    sums: dict[str, torch.Tensor] = {}
    sizes: dict[str, torch.Tensor] = {}
    parts, into = [], []
    for start in range(0, 20, TILE):  # eager, a slice at a time
        part = x[start : start + TILE].detach().requires_grad_()
        before = up(part)
        after = F.gelu(before)
        result = down(after)
        tangent = y[start : start + TILE]
        d_before, d_part = torch.autograd.grad(result, (before, part), tangent)
        parts.append(result.detach())
        into.append(d_part)
        for name, left, right in (
            ("up.weight", d_before, part.detach()),
            ("down.weight", tangent, after.detach()),
            ("up.bias", d_before, torch.ones(len(part), 1)),
        ):
            exact = left.double().t() @ right.double()
            sums[name] = sums.get(name, 0) + exact
            sizes[name] = sizes.get(name, 0) + left.double().abs().t() @ right.double().abs()
    assert torch.equal(out, torch.cat(parts))
    assert torch.equal(found["x"], torch.cat(into))
    unit_roundoff = 2.0**-24
    bound = (20 + 3) * unit_roundoff / (1 - (20 + 3) * unit_roundoff)  # 20 products, and the sums of three slices
    for name, exact in sums.items():
        assert ((found[name].double() - exact.view(found[name].shape)).abs() <= bound * sizes[name].view(found[name].shape)).all()


def _name(node: fx.Node) -> str:
    return display_name(node)


class Dropped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1, training=True))


class Watched(Mlp):
    """Something reads all tokens' hidden values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(self.up(x))
        return self.down(h), h.mean(0)


class Routed(Mlp):
    """The hidden values of chosen tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x))
        return self.down(h[torch.tensor([3, 1, 2])])


class Heads(Mlp):
    """Queries, keys and values: what is wide leaves for attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(x).split([4, 4, 8], dim=-1)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("make", [Dropped, Watched, Routed, Heads])
def test_left_as_they_are(make: type[Mlp]) -> None:
    gm = joint_graph(make(), tokens(20))
    before = text_of(gm)
    assert text_of(tile_tokens(gm, tile_bytes=TILE_BYTES)) == before


def test_without_a_size_and_where_one_slice_is_enough_nothing_changes() -> None:
    gm = joint_graph(Mlp(), tokens(TILE))
    before = text_of(gm)
    assert text_of(tile_tokens(gm)) == before
    assert text_of(tile_tokens(gm, tile_bytes=TILE_BYTES, small=False)) == before
    assert len(loops(tile_tokens(gm, tile_bytes=TILE_BYTES))) == 2


def test_parameters_in_tiles_are_left_with_a_reason() -> None:
    gm = cut(joint_graph(Mlp(), tokens(20)), 4 * HIDDEN)
    before = text_of(gm)
    assert text_of(tile_tokens(gm, tile_bytes=TILE_BYTES)) == before
    assert skipped_notes(gm) == ("tile_tokens leaves the stretch of addmm whole: up.weight is in tiles",)


@pytest.mark.parametrize("count", [3, WIDTH, HIDDEN, 200])
def test_batches_of_any_size_have_the_same_units(count: int) -> None:
    """Also where the number of tokens is that of a layer's features."""
    found = []
    for number in (20, count):
        gm = tile_tokens(joint_graph(Mlp(norm=nn.LayerNorm(WIDTH)), tokens(number)), tile_bytes=TILE_BYTES)
        found.append([node.args for node in gm.graph.nodes if is_token_loop(node)])
    assert str(found[0]) == str(found[1])


def test_equal_layers_share_the_graph_of_a_slice() -> None:
    gm = tile_tokens(joint_graph(Stack(Mlp(), Mlp(), Mlp()), tokens(20)), tile_bytes=TILE_BYTES)
    bodies = [[id(body) for body in loop.bodies.values()] for loop in loops(gm)]
    assert len(bodies) == 6
    assert len({tuple(each) for each in bodies}) == 2
    (forward,) = {str(loop) for loop in loops(gm)[:3]}
    assert forward != str(loops(gm)[-1])


def test_operations_are_those_of_all_slices() -> None:
    gm = traced(Mlp(), tokens(24))["inference"]
    whole = sum(map(operations_of, gm.graph.nodes))
    assert sum(map(operations_of, tile_tokens(gm, tile_bytes=TILE_BYTES).graph.nodes)) == whole == 2 * 2 * 24 * WIDTH * HIDDEN


def test_no_tokens_at_all() -> None:
    gm = tile_tokens(joint_graph(Mlp(), tokens(20)), tile_bytes=TILE_BYTES)
    forward, backward = (node for node in gm.graph.nodes if is_token_loop(node))
    for node in (forward, backward):
        given: list[Any] = [torch.zeros(n.meta["val"].shape) for n in node.args]
        given = [v[:0] if v.shape[0] == 20 else v for v in given]
        loop = TokenLoop(tile=TILE, rows=node.target.rows, outs=[*_dynamic(node.target)], bodies=node.target.bodies)
        assert all(not out.any() for out in loop(*given))


def _dynamic(loop: TokenLoop) -> list[Any]:
    return [dataclasses.replace(out, sizes=()) if hasattr(out, "sizes") else out for out in loop.outs]


@pytest.mark.parametrize(("row", "size", "expected"), [(64, 64 * 100, 64), (64, 64 * 128, 128), (64, 64 * 20, 20), (64, 1, 1)])
def test_slices_are_multiples_of_64_tokens(row: int, size: int, expected: int) -> None:
    assert choose_tile(row, size) == expected
