from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import copied, example_of, graph_of, lines_of, text_of, unit
from losses import CLASSES, HIDDEN, LEFT_ALONE, LOSSES, Head, assert_within, batch, exact
from torch import fx
from tracing import joint_graph

from zinf_compile.passes.analysis.print_graph import graph_text
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import skipped_notes, starts_region
from zinf_compile.passes.joint.recompute_unit_views import recompute_unit_views
from zinf_compile.passes.loss._loop import Tile
from zinf_compile.passes.loss.chunk_loss import ROWS, choose_chunks, chunk_loss, may_chunk

aten = torch.ops.aten

TOKENS_A_CHUNK = 8
CHUNK_BYTES = 4 * CLASSES * TOKENS_A_CHUNK

BEFORE = """
t = t(w)
z = mm(x, t)
l = _log_softmax(z, 1, False)
n = nll_loss_forward(l, y, None, 2, -100)
s = n[0]
return (s,)
"""
AFTER = """
valid = ne(y, -100)
targets = class_targets(y, 6, -100)
unsqueeze = unsqueeze(targets, 1)
slice_1 = slice(x, 0, 0, 2)
slice_2 = slice(unsqueeze, 0, 0, 2)
slice_3 = slice(x, 0, 2, 4)
slice_4 = slice(unsqueeze, 0, 2, 4)
alias = alias(slice_1)
permute = permute(w, [1, 0])
logits = mm(alias, permute)
log_probs = _log_softmax(logits, 1, False)
gather = gather(log_probs, 1, slice_2)
picked = squeeze(gather, 1)
alias_1 = alias(slice_3)
permute_1 = permute(w, [1, 0])
logits_1 = mm(alias_1, permute_1)
log_probs_1 = _log_softmax(logits_1, 1, False)
gather_1 = gather(log_probs_1, 1, slice_4)
picked_1 = squeeze(gather_1, 1)
cat = cat([picked, picked_1])
full = full([], 0, dtype=torch.int64, device=cpu)
full_1 = full([], -100, dtype=torch.int64, device=cpu)
where = where(valid, full, full_1)
unsqueeze_1 = unsqueeze(cat, 1)
nll_loss_forward = nll_loss_forward(unsqueeze_1, where, None, 2, -100)
getitem = nll_loss_forward[0]
return (getitem,)
"""

TRAINED = """
t = t(w); z = mm(x, t); l = _log_softmax(z, 1, False); n = nll_loss_forward(l, y, None, 2, -100); s = n[0]; k = n[1]
g = nll_loss_backward(tangents_1, l, y, None, 2, -100, k); d = _log_softmax_backward_data(g, l, 1, torch.float32)
u = t(d); dw = mm(u, x); v = t(t); dx = mm(d, v)
return (s, dx, dw)
"""
REWRITTEN = """
valid = ne(y, -100)
targets = class_targets(y, 6, -100)
one = full([], 1, dtype=torch.float32, device=cpu)
neg = neg(one)
expand = expand(neg, [4])
full = full([], 0, dtype=torch.float32, device=cpu)
where = where(valid, expand, full)
neg_1 = neg(where)
unsqueeze = unsqueeze(targets, 1)
unsqueeze_1 = unsqueeze(where, 1)
unsqueeze_2 = unsqueeze(neg_1, 1)
slice_1 = slice(x, 0, 0, 2)
slice_2 = slice(unsqueeze, 0, 0, 2)
slice_3 = slice(unsqueeze_1, 0, 0, 2)
slice_4 = slice(unsqueeze_2, 0, 0, 2)
slice_5 = slice(x, 0, 2, 4)
slice_6 = slice(unsqueeze, 0, 2, 4)
slice_7 = slice(unsqueeze_1, 0, 2, 4)
slice_8 = slice(unsqueeze_2, 0, 2, 4)
alias = alias(slice_1)
permute = permute(w, [1, 0])
logits = mm(alias, permute)
log_probs = _log_softmax(logits, 1, False)
gather = gather(log_probs, 1, slice_2)
picked = squeeze(gather, 1)
exp = exp(log_probs)
mul_ = mul_(exp, slice_4)
scatter_add_ = scatter_add_(mul_, 1, slice_2, slice_3)
dhidden = mm(scatter_add_, w)
permute_1 = permute(scatter_add_, [1, 0])
dweight = mm(permute_1, slice_1)
alias_1 = alias(slice_5)
permute_2 = permute(w, [1, 0])
logits_1 = mm(alias_1, permute_2)
log_probs_1 = _log_softmax(logits_1, 1, False)
gather_1 = gather(log_probs_1, 1, slice_6)
picked_1 = squeeze(gather_1, 1)
exp_1 = exp(log_probs_1)
mul__1 = mul_(exp_1, slice_8)
scatter_add__1 = scatter_add_(mul__1, 1, slice_6, slice_7)
dhidden_1 = mm(scatter_add__1, w)
permute_3 = permute(scatter_add__1, [1, 0])
dweight_1 = addmm_(dweight, permute_3, slice_5)
cat = cat([picked, picked_1])
full_1 = full([], 0, dtype=torch.int64, device=cpu)
full_2 = full([], -100, dtype=torch.int64, device=cpu)
where_1 = where(valid, full_1, full_2)
unsqueeze_3 = unsqueeze(cat, 1)
nll_loss_forward = nll_loss_forward(unsqueeze_3, where_1, None, 2, -100)
getitem = nll_loss_forward[0]
cat_1 = cat([dhidden, dhidden_1])
take_scaled = take_scaled(dweight_1, tangents_1)
mul = mul(cat_1, tangents_1)
return (getitem, mul, take_scaled)
"""


def small(text: str) -> fx.GraphModule:
    """Build a graph of four tokens, two numbers each, and six classes."""
    return graph_of(
        text, x=torch.empty(4, 2), w=unit(6, 2), y=torch.zeros(4, dtype=torch.long), tangents_1=torch.empty(())
    )  # fmt: skip


def test_docstring_example() -> None:
    gm = small(BEFORE)
    assert text_of(gm) == BEFORE.lstrip()
    assert text_of(chunk_loss(gm, enabled=True, chunk_bytes=2 * 6 * 4)) == AFTER.lstrip()
    assert example_of(chunk_loss) == (lines_of(BEFORE), lines_of(AFTER))
    gm.graph.lint()


def test_gradients_come_out_of_the_same_loop() -> None:
    assert text_of(chunk_loss(small(TRAINED), enabled=True, chunk_bytes=2 * 6 * 4)) == REWRITTEN.lstrip()


def in_tiles(rows: int) -> Any:
    """Return what cuts a head into tiles of so many classes."""

    def make(insert: NodeBuilder, weight: fx.Node, bias: fx.Node | None) -> Sequence[Tile]:
        classes = weight.meta["val"].shape[0]
        bounds = [(start, min(start + rows, classes)) for start in range(0, classes, rows)]
        parts = [[None if n is None else insert(aten.slice.Tensor, n, 0, *b) for n in (weight, bias)] for b in bounds]
        return [Tile(*b, *part) for b, part in zip(bounds, parts, strict=True)]  # type: ignore[arg-type]

    return make


def joint_of(head: Head, x: torch.Tensor, targets: torch.Tensor) -> fx.GraphModule:
    """Return the joint graph as chunk_loss gets it."""
    return joint_graph(head, x.requires_grad_(), targets)


def run(gm: fx.GraphModule, head: Head, x: torch.Tensor, targets: torch.Tensor, tangent: float = 1.0) -> list[torch.Tensor]:
    """Run a joint graph on a model's own numbers; return the loss and the gradients of hidden states, weight and bias."""
    known = {"head.weight": head.head.weight, "head.bias": head.head.bias, "x": x, "targets": targets}
    given, order = [], []
    for node in gm.graph.find_nodes(op="placeholder"):
        slot = node.meta.get("zinf_slot")
        name = slot.name if slot else node.meta.get("zinf_name")
        given.append(torch.tensor(tangent) if "tangents" in node.name else known[name].detach())
        order.append(name)
    loss, *grads = fx.Interpreter(gm).run(*given, enable_io_processing=False)
    found = dict(zip([name for name in order if name is not None], grads, strict=True))
    return [loss, *(found[name] for name in ("x", "head.weight", "head.bias") if name in found)]


LOOPS = {"once": {}, "twice": {"make_tiles": in_tiles(13)}}


@pytest.mark.parametrize(("name", "bias"), [*((name, name < "m") for name in LOSSES), ("mean", True), ("capped", False)])
def test_numbers_are_those_of_whole_logits_within_rounding(name: str, bias: bool) -> None:
    torch.manual_seed(1)
    head, (x, targets) = Head(LOSSES[name], bias=bias), batch()
    targets[0, :2] = -100 if name not in ("gathered", "ignored_class", "ignored_class_0") else 3
    reference = exact(head, x, targets)
    joint = joint_of(head, x, targets)
    for loop, settings in LOOPS.items():
        gm = chunk_loss(copied(joint), enabled=True, chunk_bytes=CHUNK_BYTES, **settings)
        gm.graph.lint()
        assert not skipped_notes(gm)
        products = [n for n in gm.graph.nodes if n.name.startswith("logits")]
        assert len(products) > 1 or name == "last_token", "there are several chunks"
        found = run(gm, head, x, targets)
        for what, value, expected, bound in zip(
            ("loss", "hidden", "weight", "bias"), found, reference.values, reference.bounds, strict=False
        ):
            assert_within(f"{what}, looped {loop}", value, expected, bound)
        doubled = run(gm, head, x, targets, tangent=2.0)
        for value, twice in zip(found[1:], doubled[1:], strict=True):
            assert torch.equal(2 * value, twice)  # a power of two: exact


@pytest.mark.parametrize("name", ["mean", "sum", "ignored_class", "capped", "shifted", "gathered"])
def test_one_chunk_gives_the_bits_of_the_loss(name: str) -> None:
    """Where classes come last, as in a chunk: a softmax over another dimension is another kernel, which may round otherwise."""
    head, (x, targets) = Head(LOSSES[name], bias=True), batch()
    joint = joint_of(head, x, targets)
    loss, *_ = run(joint, head, x, targets)
    found, *_ = run(chunk_loss(copied(joint), enabled=True), head, x, targets)
    assert torch.equal(found, loss)


def test_one_chunk_of_classes_in_the_middle_is_within_rounding() -> None:
    head, (x, targets) = Head(LOSSES["classes_in_the_middle"], bias=True), batch()
    reference = exact(head, x, targets)
    found, *_ = run(chunk_loss(joint_of(head, x, targets), enabled=True), head, x, targets)
    assert_within("loss", found, reference.values[0], reference.bounds[0])


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_cannot_be_chunked_comes_back_unchanged_and_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, reason = LEFT_ALONE[name]
    head, (x, targets) = Head(loss), batch()
    joint = joint_of(head, x, targets)
    before = text_of(joint)
    with caplog.at_level(logging.INFO, "zinf_compile"):
        assert text_of(chunk_loss(joint, enabled=True, chunk_bytes=CHUNK_BYTES)) == before
    (said,) = skipped_notes(joint)
    assert reason in said
    assert said in caplog.text
    assert "losses.py" in caplog.text, "the user's line is shown"
    assert graph_text(joint, sizes=True).startswith(f"# {said}\n")


def test_half_precision_that_may_lose_small_gradients_is_left_alone() -> None:
    gm = graph_of(BEFORE, x=torch.empty(4, 2).half(), w=unit(6, 2, dtype=torch.float16), y=torch.zeros(4, dtype=torch.long))
    assert text_of(chunk_loss(gm, enabled=True)) == BEFORE.lstrip()
    assert "it is of torch.float16" in skipped_notes(gm)[0]


@pytest.mark.parametrize(
    "changed",
    [
        ("t = t(w)", "t = view(w, [2, 6])"),  # not a transposed weight
        ("l = _log_softmax(z, 1, False)", "l = _log_softmax(x, 1, False)"),  # of no product
        ("l = _log_softmax(z, 1, False)", "l = _log_softmax(z, 0, False)"),  # over tokens
        ("return (s,)", "return (s, z)"),
        ("return (s,)", "return (s, l)"),
    ],
)
def test_near_misses_are_unchanged(changed: tuple[str, str]) -> None:
    text = BEFORE.replace(*changed)
    gm = graph_of(text, x=torch.empty(6, 2), w=unit(6, 2), y=torch.zeros(6, dtype=torch.long))
    assert text_of(chunk_loss(gm, enabled=True)) == text.lstrip()
    assert skipped_notes(gm)


@pytest.mark.parametrize(
    "changed",
    [
        ("dx = mm(d, v)", "e = mul(d, 2); dx = mm(e, v)"),  # a gradient that is scaled on its way
        ("dx = mm(d, v)", "e = relu(d); dx = mm(e, v)"),
        ("dx = mm(d, v)", "e = relu(v); dx = mm(d, e)"),  # multiplied by another weight
        ("return (s, dx, dw)", "return (s, dx, dw, d)"),
        ("g = nll_loss_backward(tangents_1,", "r = relu(tangents_1); g = nll_loss_backward(r,"),  # not linear... but a scalar
        ("g = nll_loss_backward(tangents_1,", "r = mul(tangents_1, s); g = nll_loss_backward(r,"),
    ],
)
def test_gradients_that_are_changed_on_their_way(changed: tuple[str, str]) -> None:
    text = TRAINED.replace(*changed)
    gm = small(text)
    before = text_of(gm)
    after = text_of(chunk_loss(gm, enabled=True))
    if "nll_loss_backward(r" in text:  # whatever makes the scalar, gradients are multiplied by it in the end
        assert "take_scaled = take_scaled(dweight, r)" in after
    else:
        assert after == before
        assert skipped_notes(gm)


def test_small_logits_are_left_as_they_are_by_default_and_all_with_false() -> None:
    gm = small(BEFORE)
    assert text_of(chunk_loss(gm)) == BEFORE.lstrip()
    large = graph_of(BEFORE, x=torch.empty(2100, 2), w=unit(2**15, 2), y=torch.zeros(2100, dtype=torch.long))
    before = text_of(large)
    assert text_of(chunk_loss(copied(large), enabled=False)) == before
    assert text_of(chunk_loss(large)) != before
    assert not skipped_notes(gm)


def test_chunks_are_printed_with_their_bytes() -> None:
    gm = chunk_loss(small(BEFORE), enabled=True, chunk_bytes=2 * 6 * 4, make_tiles=in_tiles(4))
    shown = [line.split("# ")[1] for line in graph_text(gm, sizes=True).splitlines() if "# logits" in line]
    assert shown == [
        f"logits of tokens {tokens}, classes {classes} {size} B"
        for classes, size in (("0 to 4", 32), ("4 to 6", 16))
        for tokens in ("0 to 2", "2 to 4")
    ]


def test_each_chunk_is_a_region_and_only_gradients_are_saved() -> None:
    gm = recompute_unit_views(chunk_loss(small(TRAINED), enabled=True, chunk_bytes=2 * 6 * 4))
    starts = [node.name for node in gm.graph.nodes if starts_region(node)]
    assert starts == ["alias", "alias_1", "cat"]
    text = graph_text(gm, policies=True)
    assert [line.split()[0] for line in text.splitlines() if "must_save" in line and "logits" not in line] == [
        "dhidden", "dhidden_1", "dweight_1", "cat_1",
    ]  # fmt: skip


@given(st.integers(1, 5000), st.integers(1, 400_000), st.integers(1, 2**28))
def test_chunks_hold_all_tokens_once_and_no_more_bytes_than_allowed(tokens: int, classes: int, chunk_bytes: int) -> None:
    bounds = choose_chunks(tokens, classes, chunk_bytes=chunk_bytes)
    assert [end for _, end in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert (bounds[0][0], bounds[-1][1]) == (0, tokens)
    sizes = {end - start for start, end in bounds[:-1]}
    assert len(sizes) <= 1
    for start, end in bounds:
        assert 4 * classes * (end - start) <= chunk_bytes or end - start == 1
    for size in sizes:
        assert size % ROWS == 0 or size < ROWS


def test_a_captured_graph_without_large_values_is_traced_as_ever() -> None:
    gm = small(BEFORE)
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    assert not may_chunk(gm, None)
    assert may_chunk(gm, True)
    next(iter(gm.graph.nodes)).meta["example_value"] = torch.empty(2**27, device="meta")
    assert may_chunk(gm, None)
    assert not may_chunk(gm, False)


def test_hidden_width() -> None:
    assert HIDDEN < CLASSES, "chunks and tiles of the tests are cut along different sizes"
