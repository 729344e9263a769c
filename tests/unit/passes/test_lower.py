from __future__ import annotations

from typing import Any

import pytest
import torch
from irtext import graph_of, results, text_of, unit
from torch import fx, nn

from zinf_compile.ir import ops
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Gather, GradAlias, Reduce, Region, Release, SwapIn, SwapOut, Wait
from zinf_compile.passes.graph.found_units import mark_found
from zinf_compile.passes.graph.node_facts import mark_buffer
from zinf_compile.passes.lower import lower

INPUTS = {"x": torch.empty(4, 4), "w": unit(4, 4), "u": unit(4, 4)}

SCHEDULE = """
p = relu(x)
g = all_gather(w, 0)
h = all_gather(u, 0)
v = wait(g)
t = t(v)
a = mm(p, t)
release(v)
f = wait(h)
b = mm(a, f)
release(f)
r = reduce_scatter(a, w, 0)
s = reduce_scatter(b, u, 0)
return (b, None, 3, w, r, s, 3)
"""

SWAPPED = """
p = swap_in(w, "nvme", "host", 0)
q = swap_in(u, "nvme", "host", 0)
c = swap_in(p, "host", "device", 0)
d = swap_in(q, "host", "device", 0)
g = all_gather(c, 0)
h = all_gather(d, 0)
v = wait(g)
a = mm(x, v)
release(v)
f = wait(h)
b = mm(a, f)
release(f)
r = reduce_scatter(a, w, 0)
s = reduce_scatter(b, u, 0)
o = swap_out(r, "device", "host")
l = swap_out(o, "host", "nvme")
m = swap_out(s, "device", "host")
return (b, l, m)
"""


def lowered(text: str, **inputs: torch.Tensor) -> Program:
    return lower(graph_of(text, **inputs), name="test")


def perform(program: Program, inputs: list[Any]) -> list[Any]:
    """Perform the steps with what the operators mean on one process; a register that was freed holds nothing."""
    registers: dict[int, Any] = dict(enumerate(inputs)) | dict(program.constants)
    for step, frees in zip(program.steps, program.frees, strict=True):
        match step:
            case Gather(_, members, dtype):
                registers |= {out: torch.ops.zinf.all_gather(registers[unit], dtype=dtype) for unit, out in members}
            case SwapIn(_, _, members):
                registers |= {out: registers[source].clone() for source, out in members}
            case SwapOut(_, _, members):
                registers |= {out: registers[grad].clone() for grad, out in members}
            case Wait(handle, out):
                registers[out] = registers[handle]
            case Release(full):
                registers[full].fill_(torch.nan)
            case Reduce(_, members):
                registers |= {out: registers[grad].clone() for grad, _, out, _ in members}
            case Region(fn, sources, outs):
                registers |= dict(zip(outs, fn([registers[r] for r in sources]), strict=True))
        for register in frees:
            del registers[register]
    assert set(registers) >= {r for r in program.outputs if r is not None}
    return [None if r is None else registers[r] for r in program.outputs]


def test_transfers_become_steps_and_compute_between_them_regions() -> None:
    program = lowered(SCHEDULE, **INPUTS)
    kinds = [type(step).__name__ for step in program.steps]
    assert kinds == ["Region", "Gather", "Wait", "Region", "Release", "Wait", "Region", "Release", "Reduce"]
    assert program.inputs == 3
    assert {r: s.name for r, s in program.slots.items()} == {1: "w", 2: "u"}
    gather, reduce = program.steps[1], program.steps[-1]
    assert isinstance(gather, Gather)
    assert (gather.group, [unit for unit, _ in gather.members]) == (0, [1, 2])
    assert isinstance(reduce, Reduce)
    assert (reduce.group, [unit for _, unit, _, _ in reduce.members]) == (0, [1, 2])


def test_outputs_constants_and_parameters_that_pass_through() -> None:
    program = lowered(SCHEDULE, **INPUTS)
    assert program.outputs[1] is None
    assert [program.constants.get(r) for r in program.outputs if r is not None] == [None, 3, None, None, None, 3]
    assert program.outputs[3] == 1


def test_swaps_become_steps_a_group_and_hop_in_one() -> None:
    program = lowered(SWAPPED, **INPUTS)
    assert [type(step).__name__ for step in program.steps] == [
        "SwapIn", "SwapIn", "Gather", "Wait", "Region", "Release", "Wait", "Region", "Release", "Reduce",
        "SwapOut", "SwapOut", "SwapOut",
    ]  # fmt: skip
    read, copied, gather = program.steps[:3]
    assert isinstance(read, SwapIn)
    assert isinstance(copied, SwapIn)
    assert isinstance(gather, Gather)
    assert (read.src, read.dst, copied.src, copied.dst) == ("nvme", "host", "host", "device")
    assert [source for source, _ in read.members] == [1, 2]
    assert [source for source, _ in copied.members] == [out for _, out in read.members]
    assert [source for source, _ in gather.members] == [out for _, out in copied.members]
    outs = [step for step in program.steps if isinstance(step, SwapOut)]
    assert [(step.src, step.dst) for step in outs] == [("device", "host"), ("host", "nvme"), ("device", "host")]
    assert outs[1].reads == outs[0].writes
    assert program.outputs[1:] == (*outs[1].writes, *outs[2].writes)


def test_groups_and_hops_of_swaps_that_stand_together_are_steps_of_their_own() -> None:
    text = """
        p = swap_in(w, "nvme", "device", 0); q = swap_in(u, "nvme", "device", 1); g = all_gather(p, 0); h = all_gather(q, 1)
        c = swap_in(w, "nvme", "device"); d = swap_in(u, "nvme", "device"); k = all_gather(c); l = all_gather(d)
        e = wait(g); f = wait(h); i = wait(k); j = wait(l); release(e); release(f); release(i); release(j)
    """
    assert [len(step.members) for step in lowered(text, **INPUTS).steps if isinstance(step, SwapIn)] == [1, 1, 1, 1]


def test_gradients_that_are_reduced_together_leave_in_one_step() -> None:
    text = """
        r = reduce_scatter(x, w, 0); s = reduce_scatter(x, u, 0);
        o = swap_out(r, "device", "host"); p = swap_out(s, "device", "host")
        c = reduce_scatter(x, w, 1); d = reduce_scatter(x, u, 2);
        e = swap_out(c, "device", "host"); f = swap_out(d, "device", "host")
        g = reduce_scatter(x, w); h = reduce_scatter(x, u);
        k = swap_out(g, "device", "host"); l = swap_out(h, "device", "host")
        return (o, p, e, f, k, l)
    """
    program = lowered(text, **INPUTS)
    assert [len(step.members) for step in program.steps if isinstance(step, SwapOut)] == [2, 1, 1, 1, 1]
    assert {program.slots[unit].name: tier for unit, tier in program.leaves.items()} == {"w": "host", "u": "host"}


def test_swaps_are_no_part_of_the_collective_sequence() -> None:
    kept = [line for line in SWAPPED.splitlines() if "swap" not in line]
    text = "\n".join(kept).replace("(c, 0)", "(w, 0)").replace("(d, 0)", "(u, 0)").replace("(b, l, m)", "(b, r, s)")
    assert lowered(text, **INPUTS).sequence == lowered(SWAPPED, **INPUTS).sequence


@pytest.mark.parametrize(("text", "outputs"), [(SCHEDULE, 7), (SWAPPED, 3)])
def test_the_steps_give_the_graphs_numbers_from_registers_that_are_freed_after_their_last_use(text: str, outputs: int) -> None:
    gm = graph_of(text, **INPUTS)
    values = results(gm)
    program = lower(gm, name="test")
    assert torch.equal(torch.stack([v for v in perform(program, values[outputs:]) if isinstance(v, torch.Tensor)]),
                       torch.stack([v for v in values[:outputs] if isinstance(v, torch.Tensor)]))  # fmt: skip
    freed = [r for frees in program.frees for r in frees]
    kept = {r for r in program.outputs if r is not None} | set(program.constants)
    assert len(freed) == len(set(freed))
    assert set(freed) | kept == set(range(program.registers)), "every register is freed or returned"


def test_what_nobody_reads_is_freed_at_once() -> None:
    program = lowered("g = all_gather(w); v = wait(g); a = relu(x); r = reduce_scatter(a, w)", x=torch.empty(4, 4), w=unit(4, 4))
    freed = [r for frees in program.frees for r in frees]
    assert sorted(freed) == list(range(program.registers))


def test_the_collective_sequence_says_what_ranks_must_agree_on() -> None:
    program = lowered(SCHEDULE, **INPUTS)
    assert program.sequence == (
        "all_gather group 0: w [4, 4] float32",
        "all_gather group 0: u [4, 4] float32",
        "reduce_scatter group 0: w [4, 4] float32",
        "reduce_scatter group 0: u [4, 4] float32",
    )
    assert program.digest() == lowered(SCHEDULE.replace("relu", "sin"), **INPUTS).digest()
    assert program.digest() != lowered(SCHEDULE.replace("(u, 0)", "(u, 1)"), **INPUTS).digest()


def test_what_travels_narrow_says_so_in_its_step_and_in_the_sequence() -> None:
    text = SCHEDULE.replace("w, 0)\nh", "w, 0, dtype=torch.bfloat16)\nh").replace("(u, 0)", "(u, 0, dtype=torch.bfloat16)")
    program = lowered(text.replace("relu(x)", "_to_copy(x, dtype=torch.bfloat16)"), **INPUTS)
    assert [step.dtype for step in program.steps if isinstance(step, Gather)] == [torch.bfloat16]
    assert [step.dtype for step in lowered(SCHEDULE, **INPUTS).steps if isinstance(step, Gather)] == [torch.float32]
    assert program.sequence[:3] == (
        "all_gather group 0: w [4, 4] float32 as bfloat16",
        "all_gather group 0: u [4, 4] float32 as bfloat16",
        "reduce_scatter group 0: w [4, 4] float32",
    )


def test_lone_transfers_are_issued_one_by_one() -> None:
    program = lowered("g = all_gather(w); h = all_gather(u); v = wait(g); f = wait(h); release(v); release(f)", **INPUTS)
    assert [len(step.members) for step in program.steps if isinstance(step, Gather)] == [1, 1]


def test_a_graph_that_moves_nothing_is_one_region() -> None:
    program = lowered("a = relu(x); b = sin(a); return (b,)", x=torch.empty(3))
    assert [type(step) for step in program.steps] == [Region]
    assert program.sequence == ()


def test_buffers_are_named() -> None:
    gm = graph_of("a = relu(x); return (a,)", x=torch.empty(3))
    mark_buffer(next(iter(gm.graph.nodes)), "norm.running_mean")
    assert lower(gm, name="test").buffers == {0: "norm.running_mean"}


def seen(text: str) -> list[GradAlias]:
    program = lowered(text, **INPUTS)
    return [member[3] for step in program.steps if isinstance(step, Reduce) for member in step.members]


def test_a_gradient_that_nothing_sees_later_may_be_kept() -> None:
    assert seen("a = relu(x); t = t(a); r = reduce_scatter(t, w); return (r,)") == [GradAlias.NOBODY]


def test_a_gradient_that_the_graph_reads_later_must_not_change() -> None:
    assert seen("a = relu(x); t = t(a); r = reduce_scatter(a, w); b = relu(t); return (r, b)") == [GradAlias.GRAPH]
    text = "a = relu(x); r = reduce_scatter(a, w, 0); s = reduce_scatter(a, u, 0); return (r, s)"
    assert seen(text) == [GradAlias.GRAPH, GradAlias.NOBODY]
    text = "g = all_gather(u); v = wait(g); t = t(v); r = reduce_scatter(t, w); release(v); return (r,)"
    assert seen(text) == [GradAlias.GRAPH]


def test_a_gradient_that_the_caller_can_write_to_must_be_copied() -> None:
    assert seen("a = relu(x); r = reduce_scatter(a, w); return (a, r)") == [GradAlias.CALLER]
    assert seen("a = relu(x); t = t(a); r = reduce_scatter(a, w); return (r, t)") == [GradAlias.CALLER]
    assert seen("r = reduce_scatter(x, w); return (r,)") == [GradAlias.CALLER]


def test_constants_of_the_module_reach_their_regions() -> None:
    root = nn.Module()
    root.register_buffer("mask", torch.tensor([1.0, 0.0]))
    graph = fx.Graph()
    x = graph.placeholder("x")
    mask = graph.get_attr("mask")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, mask)), mask))
    gm = fx.GraphModule(root, graph)
    assert "mask = self.mask" in text_of(gm)
    product, constant = perform(lower(gm, name="test"), [torch.tensor([3.0, 4.0])])
    assert product.tolist() == [3.0, 0.0]
    assert constant.tolist() == [1.0, 0.0]


def test_a_program_knows_the_units_that_it_begins_and_ends_with() -> None:
    """Those that are there before any compute, and those that are let go of behind all of it."""
    text = "{}; a = mm(x, v); b = mm(a, z); release(v); release(z); r = reduce_scatter(b, w); return (b, r)"
    gathers = "g = all_gather(w); h = all_gather(u); v = wait(g); z = wait(h)"
    program = lowered(text.format(gathers), **INPUTS)
    fulls = [step.full for step in program.steps if isinstance(step, Release)]
    assert dict(program.ends) == {fulls[0]: 1, fulls[1]: 2}
    key = {slot.name: slot.key for slot in program.slots.values()}
    assert program.finds == {(key["w"], torch.float32), (key["u"], torch.float32)}
    assert [program.key_of(register) for register in program.slots] == list(key.values())
    later = lowered(SCHEDULE, **INPUTS)
    assert not later.finds, "compute comes first"
    last = [step.full for step in later.steps if isinstance(step, Release)][-1]
    assert dict(later.ends) == {last: 2}


def test_a_program_knows_the_last_gather_of_each_unit_and_what_a_plan_has_stay() -> None:
    """Those by which a forward on several ranks leaves shards, and those that its backward finds, not what it begins with."""
    text = "g = all_gather(w); v = wait(g); a = mm(x, v); release(v); h = all_gather(u); z = wait(h); b = mm(a, z); release(z); "
    gm = graph_of(text + "k = all_gather(w); y = wait(k); c = mm(b, y); release(y); return (c,)", **INPUTS)
    gathers = [node for node in gm.graph.nodes if node.target is ops.all_gather]
    mark_found(gathers[1])
    program = lower(gm, name="test")
    outs = [out for step in program.steps if isinstance(step, Gather) for _, out in step.members]
    slots = {slot.name: register for register, slot in program.slots.items()}
    assert dict(program.last_gathers) == {outs[2]: slots["w"], outs[1]: slots["u"]}
    key = {slot.name: slot.key for slot in program.slots.values()}
    assert program.finds_planned == {(key["u"], torch.float32)}
    assert program.finds == {(key["w"], torch.float32), (key["u"], torch.float32)}
