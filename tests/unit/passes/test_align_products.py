from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from irtext import copied, example_of, graph_of, lines_of, text_of, unit
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.passes.joint.align_products import align_products
from zinf_compile.passes.joint.recompute_unit_views import recompute_unit_views

BEFORE = """
t = t(w)
y = mm(x, t)
a = relu(y)
"""
AFTER = """
pad = constant_pad_nd(w, [0, 0, 0, 5])
pad_t = permute(pad, [1, 0])
product = mm(x, pad_t)
y = slice(product, 1, 0, 11)
a = relu(y)
"""
align = partial(align_products, devices=("cpu",), worth=0)


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def weight(*shape: int) -> torch.Tensor:
    return unit(*shape, dtype=torch.bfloat16)


def aligned(text: str, **inputs: torch.Tensor) -> list[str]:
    gm = align(graph_of(text, **inputs))
    gm.graph.lint()
    names = {"constant_pad_nd_default": "pad", "constant_pad_nd_default_1": "pad_1", "slice_tensor": "part"}
    return text_of(gm, permute_default="pad_t", mm_default="product", mm_default_1="product_1", **names).splitlines()


def test_docstring_example() -> None:
    assert lines_of("\n".join(aligned(BEFORE + "return (a,)", x=matrix(2, 16), w=weight(11, 16))).replace("part", "y")) == [
        *lines_of(AFTER),
        "return (a,)",
    ]
    assert example_of(align_products) == (lines_of(BEFORE), lines_of(AFTER))


def test_the_rows_of_a_gradient_are_padded_once_for_both_of_its_products() -> None:
    text = "p = permute(d, [1, 0]); g = mm(p, x); dx = mm(d, w); return (g, dx)"
    assert aligned(text, d=matrix(32, 11), x=matrix(32, 16), w=weight(11, 16)) == [
        "pad = constant_pad_nd(d, [0, 5, 0, 0])",
        "pad_t = permute(pad, [1, 0])",
        "product = mm(pad_t, x)",
        "part = slice(product, 0, 0, 11)",
        "pad_1 = constant_pad_nd(w, [0, 0, 0, 5])",
        "product_1 = mm(pad, pad_1)",
        "return (part, product_1)",
    ]


def test_a_bias_is_padded_with_what_it_is_added_to_and_views_follow_the_strides() -> None:
    text = "t = t(w); y = addmm(b, x, t); v = view(y, [2, 16, 11]); a = relu(v); return (a,)"
    gm = align(graph_of(text, b=matrix(11), x=matrix(32, 16), w=weight(11, 16)))
    made = {node.name: node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"}
    assert made["addmm_default"].shape == (32, 16)
    assert made["slice_tensor"].stride() == (16, 1)
    assert made["v"].stride() == (256, 16, 1)
    assert made["a"].stride() == (176, 11, 1)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("t = t(w); y = mm(x, t); return (y,)", {"x": matrix(2, 16), "w": weight(11, 16)}),  # the caller gets these strides
        ("t = t(w); y = mm(x, t); v = view(y, [22]); a = relu(v); return (a,)", {"x": matrix(2, 16), "w": weight(11, 16)}),
        ("y = mm(x, w); s = as_strided(y, [5, 6], [6, 1]); return (neg(s),)", {"x": matrix(4, 16), "w": weight(16, 11)}),
        (
            "y = mm(x, w); p = select(y, 0, 1); s = as_strided(p, [5], [2]); return (neg(s),)",
            {"x": matrix(4, 16), "w": weight(16, 11)},
        ),
        ("t = t(w); e = expand(t, [4, 16, 11]); y = bmm(x, e); return (neg(y),)", {"x": matrix(4, 9, 16), "w": weight(11, 16)}),
        ("y = mm(x, w); m = aminmax(y); a = m[0]; return (a,)", {"x": matrix(4, 16), "w": weight(16, 11)}),  # several results
        ("y = mm(x, w); a = relu(y); return (a,)", {"x": matrix(2, 16), "w": weight(16, 24)}),  # aligned
        ("p = t(x); y = mm(p, w); a = relu(y); return (a,)", {"x": matrix(16, 11, dtype=torch.float32), "w": unit(16, 24)}),
        ("y = mm(x, w); a = relu(y); return (a,)", {"x": matrix(11, 16), "w": weight(16, 24)}),  # nothing lies in rows of 11
        ("i = tile(w, [0, 0], [11, 16]); p = t(i); y = mm(x, p); return (neg(y),)", {"x": matrix(2, 16), "w": weight(22, 16)}),
        ("y = mm(x, w); a = relu(y); return (a,)", {"x": matrix(9, 4), "w": weight(4, 3)}),  # shorter than a padded row
    ],
)
def test_what_stays(text: str, inputs: dict[str, torch.Tensor]) -> None:
    gm = graph_of(text, **inputs)
    before = text_of(copied(gm))
    assert text_of(align(gm)) == before


def test_products_too_small_to_gain_and_other_devices_stay() -> None:
    gm = graph_of(BEFORE + "return (a,)", x=matrix(2, 16), w=weight(11, 16))
    before = text_of(copied(gm))
    assert text_of(align_products(gm, devices=("cpu",))) == before
    assert text_of(align_products(gm, worth=0)) == before


def test_what_is_made_of_a_unit_is_recomputed_and_the_product_saved() -> None:
    gm = align(recompute_unit_views(graph_of(BEFORE + "return (a,)", x=matrix(2, 16), w=weight(11, 16))))
    policies = {node.name: node.meta.get("recompute") for node in gm.graph.nodes if node.op == "call_function"}
    assert policies == {
        "constant_pad_nd_default": CheckpointPolicy.MUST_RECOMPUTE,
        "permute_default": CheckpointPolicy.MUST_RECOMPUTE,
        "mm_default": CheckpointPolicy.MUST_SAVE,
        "slice_tensor": None,
        "a": None,
    }


def test_what_runs_again_with_a_product_is_not_shared_with_others() -> None:
    """A pad in a checkpointed region is recomputed with it: unmarked, it would be saved."""
    text = "t = t(d); y = mm(t, x); z = mm(d, w); a = neg(z); return (y, a)"
    gm = graph_of(text, d=matrix(32, 11), x=matrix(32, 16), w=weight(11, 16))
    for number, product in enumerate(node for node in gm.graph.nodes if node.name in "yz"):
        product.meta["recompute"], product.meta["ac_graph_id"] = CheckpointPolicy.PREFER_RECOMPUTE, number
    marks = {
        (node.name, node.meta.get("recompute"), node.meta.get("ac_graph_id"))
        for node in align(gm).graph.nodes
        if node.target is torch.ops.aten.constant_pad_nd.default and node.args[0].name == "d"
    }
    assert {mark[1:] for mark in marks} == {(CheckpointPolicy.PREFER_RECOMPUTE, 0), (CheckpointPolicy.PREFER_RECOMPUTE, 1)}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(9, 40)] * 3),
    turned=st.tuples(st.booleans(), st.booleans()),
    kind=st.sampled_from(["mm", "addmm", "bmm", "baddbmm"]),
    wide=st.booleans(),
)
def test_results_are_those_of_the_product(
    sizes: tuple[int, int, int], turned: tuple[bool, bool], kind: str, *, wide: bool
) -> None:
    m, k, n = sizes
    batch = (3,) if "bmm" in kind else ()
    generator = torch.Generator().manual_seed(m + 41 * k + 1681 * n)

    def factor(rows: int, columns: int, *, turn: bool) -> tuple[torch.Tensor, str]:
        shape = (*batch, columns, rows) if turn else (*batch, rows, columns)
        return torch.randn(shape, generator=generator).to(torch.bfloat16), "transpose(%s, -2, -1)" if turn else "%s"

    (x, as_x), (w, as_w) = factor(m, k, turn=turned[0]), factor(k, n, turn=turned[1])
    inputs = {"x": x, "w": w}
    text = "; ".join(f"{name} = {how % source}" for name, how, source in (("p", as_x, "x"), ("q", as_w, "w")) if how != "%s")
    args = f"{'p' if turned[0] else 'x'}, {'q' if turned[1] else 'w'}"
    if "add" in kind:
        inputs["b"] = torch.randn(*batch, m if wide else 1, n, generator=generator).to(torch.bfloat16)
        args = f"b, {args}"
    gm = graph_of(f"{text}; y = {kind}({args}); a = neg(y); return (a,)".lstrip("; "), **inputs)
    expected = gm(*inputs.values())[0]
    align(gm).recompile()
    (got,) = gm(*inputs.values())
    x, w = (f.abs().float().transpose(-2, -1) if turn else f.abs().float() for f, turn in zip((x, w), turned, strict=True))
    bound = (x @ w + inputs.get("b", torch.zeros(())).abs().float()) * 2.0**-7  # both add up in fp32, and round to bf16 once
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    assert ((got.float() - expected.float()).abs() <= bound).all()
