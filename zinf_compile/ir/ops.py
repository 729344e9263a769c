"""The intermediate representation: operators for transfers between ranks and between tiers, and their order.

| operator                                  | meaning                                                                    |
|-------------------------------------------|----------------------------------------------------------------------------|
| `zinf::swap_in(unit, src, dst, group)`    | moves this rank's shard by one hop; starts the transfer, returns a handle  |
| `zinf::all_gather(unit, group, dtype=)`   | shards of all ranks -> full unit; starts the transfer, returns a handle    |
| `zinf::wait(handle)`                      | the full unit, usable after this node                                      |
| `zinf::release(full)`                     | this graph needs the full unit no longer                                   |
| `zinf::keep_for_backward(full)`           | the full unit as a value that the forward saves: its backward reads that   |
| `zinf::gather_rows(unit, indices, src)`   | the rows of the unit at these indices, from shards of all ranks            |
| `zinf::reduce_scatter(grad, unit, group)` | full gradient -> averaged shard; starts it, returns a gradient handle      |
| `zinf::swap_out(grad, src, dst)`          | moves a reduced gradient's shard by one hop; starts it, as a handle        |
| `zinf::swap_values_out(values, src, dst)` | moves the memory behind saved values by one hop; starts it, as a handle    |
| `zinf::swap_values_in(values, src, dst)`  | the same towards the device                                                |
| `zinf::wait_value(values, number)`        | one of them, once its memory has moved: there, or a stand-in for it        |
| `zinf::drop_value(value)`                 | this graph lets a saved value go; a stand-in for it, without memory        |
| `zinf::copy_value(value)`                 | a copy of a value that the caller may write to                             |
| `zinf::random_state(generator)`           | the state of a device's default random generator                           |
| `zinf::set_random_state(state, generator)`| sets that state; the one before                                            |

`unit` is the hollow parameter itself (for a second `swap_in` and for a gather also the handle of the `swap_in` before): it has
the logical shape and holds no bytes. `src` and `dst` are tiers: "device", "host", "nvme". `group` numbers the transfers that are
issued together (-1: alone); gradients are swapped out together where they were reduced together. With a `dtype`, shards are
cast to that narrower type before they are sent, and the full unit has that type. `reduce_scatter(..., dtype=)` casts a gradient
before it is sent, mostly to a wider type, which its shard then has; its result still shows the parameter's type. One
`at_step=True` sends nothing here: the full gradient is kept, those of further backwards are added to it, and it is reduced when
its shard is first read, by clipping or by the step. Handles and
results have the logical shape of the parameter, so that the graph type-checks as if nothing were partitioned.

A parameter that is too large to be whole in one place is moved in tiles, each a unit by itself: `zinf::tile(unit, start, end)`
stands for the box between these indices, and `zinf::join_tiles(parts, unit)` for the gradient whose tiles are `parts`. Of a
parameter that is only indexed by rows, `zinf::gather_rows` moves those rows from the tier `src`; it returns when they are there.
`zinf::reduce_buffer(unit)` is memory for the full gradient of a tile, to be written and reduced: where the shard will be, if it
can.

Saved values are what a forward keeps for its backward. Those that are views of one memory move together: a handle is the list of
them. In a forward `wait_value` returns a `SavedValue`, which has the value's metadata and no bytes; the backward gets that as its
input, and has the value itself from its own `wait_value`.

A saved value that is dropped is made again: the backward runs the forward's own regions a second time, in front of the one that
reads it. A region that draws random numbers finds the generator's state as it was in the forward, and leaves it as it found it.

A unit that is kept for the backward is one of the values that a forward saves, under the name of `keep_for_backward`'s result:
its memory stays where the gather put it, and `release` lets go of the forward's own name of it. Later
uses in the forward, and those of the backward, read the kept value, and gather nothing.

A gather is a transfer between ranks, a swap one of a rank's own shard: with N ranks 1/N of the unit. With parameters on a drive,
two hops from the device, the middle of a forward is, with one group of layers in each stage:

    h = all_gather(c, 2);  d = swap_in(s, "host", "device", 3);  t = swap_in(w4, "nvme", "host", 4)
    v = wait(g);  a = mm(x, v);  release(v)

The kernels registered here are the operators' results on one process, where a shard is the whole: a scheduled graph can so be
run as plain FX, which is how tests compare numbers before and after a pass. In training the executor of
`zinf_compile.runtime` performs the schedule instead and never dispatches these operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zinf_compile.ir.tiers import Tier

from .op_spec import COPY_IN, COPY_OUT, GATHER, LONE_GROUP, READ, REDUCE, WRITE, OpSpec, Volume, define
from .random_states import ACCELERATOR_STATE_BYTES, STATE_BYTES, set_state_of, state_of
from .steps import Gather, GatherRows, KeepUnit, Reduce, ReduceBuffer, Release, SwapIn, SwapOut, Wait
from .tiling import tile_stride
from .value_steps import CopyValue, DropValue, RandomState, SetRandomState, SwapValuesIn, SwapValuesOut, WaitValue


def _swap_in(unit: torch.Tensor, src: str, dst: str, group: int = LONE_GROUP) -> torch.Tensor:
    return torch.empty_strided(unit.size(), unit.stride(), dtype=unit.dtype, device=unit.device).copy_(unit)


def _swap_out(grad: torch.Tensor, src: str, dst: str) -> torch.Tensor:
    return grad.clone()


def _all_gather(unit: torch.Tensor, group: int = LONE_GROUP, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(unit.size(), unit.stride(), dtype=dtype or unit.dtype, device=unit.device).copy_(unit)


def _gather_rows(unit: torch.Tensor, indices: torch.Tensor, src: str = Tier.DEVICE) -> torch.Tensor:
    return torch.nn.functional.embedding(indices, unit)


def _reduce_buffer(unit: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(unit.size(), unit.stride(), dtype=unit.dtype, device=unit.device)


def _wait(handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(handle.size(), handle.stride(), dtype=handle.dtype, device=handle.device).copy_(handle)


def _release(full: torch.Tensor) -> None:
    return None


def _keep_for_backward(full: torch.Tensor) -> torch.Tensor:
    return _in_own_memory(full)


def _reduce_scatter(
    grad: torch.Tensor,
    unit: torch.Tensor,
    group: int = LONE_GROUP,
    *,
    dtype: torch.dtype | None = None,
    at_step: bool = False,
) -> torch.Tensor:
    return grad.clone() if dtype is None else grad.to(dtype, copy=True).to(grad.dtype)


def _tile(unit: torch.Tensor, start: Sequence[int], end: Sequence[int]) -> torch.Tensor:
    part = unit
    for dim, (first, last) in enumerate(zip(start, end, strict=True)):
        part = part.narrow(dim, first, last - first)
    box = tuple(zip(start, end, strict=True))
    return unit.new_empty_strided(part.size(), tile_stride(box, unit.stride())).copy_(part)


def _join_tiles(parts: Sequence[torch.Tensor], unit: torch.Tensor) -> torch.Tensor:
    stretches = []
    for part in parts:
        box = tuple((0, size) for size in part.shape)
        laid_out = part.new_empty_strided(part.size(), tile_stride(box, unit.stride())).copy_(part)
        stretches.append(laid_out.as_strided((part.numel(),), (1,)))
    return torch.cat(stretches).as_strided(unit.size(), unit.stride())


def _swap_values(values: Sequence[torch.Tensor], src: str, dst: str) -> list[torch.Tensor]:
    return [_in_own_memory(value) for value in values]


def _wait_value(values: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    return _in_own_memory(values[number])


def _in_own_memory(value: torch.Tensor) -> torch.Tensor:
    if not value.numel():
        return value.clone()
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    span = value.as_strided((last + 1,), (1,))
    return span.clone().as_strided(value.shape, value.stride())


def _copy_value(value: torch.Tensor) -> torch.Tensor:
    return _in_own_memory(value)


def _random_state(generator: str) -> torch.Tensor:
    return state_of(generator)


def _set_random_state(state: torch.Tensor, generator: str) -> torch.Tensor:
    before = state_of(generator)
    set_state_of(generator, state)
    return before


def _some_state(generator: str) -> torch.Tensor:
    return torch.empty(STATE_BYTES if torch.device(generator).type == "cpu" else ACCELERATOR_STATE_BYTES, dtype=torch.uint8)


def _read_or_copied(src: str, dst: str) -> str:
    return COPY_IN if Tier(src).in_memory else READ


def _written_or_copied(src: str, dst: str) -> str:
    return COPY_OUT if Tier(dst).in_memory else WRITE


swap_in = define(
    OpSpec(
        name="swap_in",
        schema="(Tensor unit, str src, str dst, int group=-1) -> Tensor",
        kernel=_swap_in,
        step=SwapIn.of,
        lane=_read_or_copied,
        volume=Volume.SHARD,
    )
)
swap_out = define(
    OpSpec(
        name="swap_out",
        schema="(Tensor grad, str src, str dst) -> Tensor",
        kernel=_swap_out,
        step=SwapOut.of,
        lane=_written_or_copied,
        volume=Volume.SHARD,
    )
)
all_gather = define(
    OpSpec(
        name="all_gather",
        schema="(Tensor unit, int group=-1, *, ScalarType? dtype=None) -> Tensor",
        kernel=_all_gather,
        step=Gather.of,
        lane=GATHER,
        volume=Volume.OTHER_SHARDS,
        collective=True,
    )
)
gather_rows = define(
    OpSpec(
        name="gather_rows",
        schema='(Tensor unit, Tensor indices, str src="device") -> Tensor',
        kernel=_gather_rows,
        step=GatherRows.of,
        lane=GATHER,
        volume=Volume.ROWS,
        collective=True,
    )
)
reduce_scatter = define(
    OpSpec(
        name="reduce_scatter",
        schema="(Tensor grad, Tensor unit, int group=-1, *, ScalarType? dtype=None, bool at_step=False) -> Tensor",
        kernel=_reduce_scatter,
        step=Reduce.of,
        lane=REDUCE,
        volume=Volume.OTHER_SHARDS,
        collective=True,
    )
)
swap_values_out = define(
    OpSpec(
        name="swap_values_out",
        schema="(Tensor[] values, str src, str dst) -> Tensor[]",
        kernel=_swap_values,
        step=SwapValuesOut.of,
        lane=_written_or_copied,
        volume=Volume.VALUES,
        has_unit=False,
    )
)
swap_values_in = define(
    OpSpec(
        name="swap_values_in",
        schema="(Tensor[] values, str src, str dst) -> Tensor[]",
        kernel=_swap_values,
        step=SwapValuesIn.of,
        lane=_read_or_copied,
        volume=Volume.VALUES,
        has_unit=False,
    )
)
wait_value = define(
    OpSpec(
        name="wait_value",
        schema="(Tensor[] values, int number) -> Tensor",
        kernel=_wait_value,
        step=WaitValue.of,
        has_unit=False,
    )
)
drop_value = define(
    OpSpec(name="drop_value", schema="(Tensor value) -> Tensor", kernel=_copy_value, step=DropValue.of, has_unit=False)
)
copy_value = define(
    OpSpec(name="copy_value", schema="(Tensor value) -> Tensor", kernel=_copy_value, step=CopyValue.of, has_unit=False)
)
random_state = define(
    OpSpec(
        name="random_state",
        schema="(str generator) -> Tensor",
        kernel=_random_state,
        fake=_some_state,
        step=RandomState.of,
        has_unit=False,
    )
)
set_random_state = define(
    OpSpec(
        name="set_random_state",
        schema="(Tensor state, str generator) -> Tensor",
        kernel=_set_random_state,
        fake=lambda state, generator: torch.empty_like(state),
        step=SetRandomState.of,
        has_unit=False,
    )
)
wait = define(OpSpec(name="wait", schema="(Tensor handle) -> Tensor", kernel=_wait, step=Wait.of))
keep_for_backward = define(
    OpSpec(name="keep_for_backward", schema="(Tensor full) -> Tensor", kernel=_keep_for_backward, step=KeepUnit.of)
)
release = define(OpSpec(name="release", schema="(Tensor full) -> ()", kernel=_release, step=Release.of))
reduce_buffer = define(
    OpSpec(name="reduce_buffer", schema="(Tensor unit) -> Tensor", kernel=_reduce_buffer, step=ReduceBuffer.of, compute=True)
)
tile = define(OpSpec(name="tile", schema="(Tensor unit, int[] start, int[] end) -> Tensor", kernel=_tile))
join_tiles = define(OpSpec(name="join_tiles", schema="(Tensor[] parts, Tensor unit) -> Tensor", kernel=_join_tiles))
