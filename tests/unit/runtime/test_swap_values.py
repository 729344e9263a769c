from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zinf_compile.errors import StoreError, UnsupportedModelError
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.close_context import close_context
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.device.simulated import SimulatedDevice
from zinf_compile.runtime.storage.value_space import ValueSpace
from zinf_compile.runtime.transfer.saved_value import SavedValue
from zinf_compile.runtime.transfer.swap_values import LeavingValues, swap_further, swap_in, swap_on, swap_out

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.fixture(params=["here", "apart"])
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    made = Context(None, torch.device("cpu"), timeout_s=20, link=SimulatedDevice() if request.param == "apart" else None)
    yield made
    close_context(made)


@pytest.fixture
def space(context: Context, tmp_path: Path) -> ValueSpace:
    return context.value_space(Tier.NVME, (str(tmp_path),))


def away(values: list[torch.Tensor], context: Context, space: ValueSpace) -> list[SavedValue]:
    """Move values to the drive, by all hops, and return what the forward hands over."""
    apart = context.link.topology.host_apart
    leaving: LeavingValues = swap_out(values, Tier.HOST if apart else Tier.NVME, context, space, "a forward")
    if apart:
        leaving.wait()
        leaving = swap_on(leaving, Tier.NVME, context, space)
    leaving.wait()
    return [leaving.value(number) for number in range(len(values))]


def back(saved: list[SavedValue], context: Context) -> list[torch.Tensor]:
    apart = context.link.topology.host_apart
    returning = swap_in(saved, Tier.HOST if apart else Tier.DEVICE, context)
    if apart:
        returning = swap_further(returning, context)
    returning.wait()
    return [returning.value(number) for number in range(len(saved))]


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def views() -> dict[str, list[torch.Tensor]]:
    base = some(64, 130)
    return {
        "a whole and its transpose": [base, base.t()],
        "slices that don't begin at a page": [base[3:20, 5:], base[10:40, ::2]],
        "an expanded one": [some(64, 1)[7:].expand(-1, 33)],
        "another type of the same memory": [base, base.view(torch.int32)[1:]],
        "masks": [some(9, 1001, dtype=torch.bool)],
        "sixteen bits": [some(1027, dtype=torch.bfloat16)],
        "two memories": [some(50, 50), some(40, 40).t()],
        "nothing": [torch.empty(0, 4)],
    }


@pytest.mark.parametrize("name", views())
def test_values_come_back_as_they_were(name: str, context: Context, space: ValueSpace) -> None:
    values = views()[name]
    expected = [value.clone(memory_format=torch.preserve_format) for value in values]
    saved = away(values, context, space)
    for value in values:
        value.untyped_storage().fill_(7)  # its memory is free
    for _ in range(2):  # as under retain_graph
        for found, before, value in zip(back(saved, context), expected, values, strict=True):
            assert torch.equal(found, before)
            assert (found.dtype, found.stride()) == (value.dtype, value.stride())
            assert found.data_ptr() % 64 == value.data_ptr() % 64, "kernels may choose by that"


def test_views_of_one_memory_move_once(context: Context, space: ValueSpace) -> None:
    base = some(64, 64)
    saved = away([base, base.t(), base[5]], context, space)
    assert len({id(value.memory) for value in saved}) == 1
    found = back(saved, context)
    assert len({value.untyped_storage().data_ptr() for value in found}) == 1
    links = context.lanes.meter.report()
    assert links["host to nvme"]["bytes"] == links["nvme to host"]["bytes"] == base.nbytes
    assert space.bytes == base.nbytes


def test_space_is_given_back_with_the_last_stand_in_and_used_again(context: Context, space: ValueSpace) -> None:
    space.reserve([16384, 16384])
    first, second = away([some(64, 64)], context, space), away([some(64, 64)], context, space)
    assert (space.bytes, space.reserved_bytes) == (32768, 32768)
    other = first[0].detach()
    del first, second
    gc.collect()
    assert space.bytes == 16384
    (found,) = back([other], context)  # type: ignore[list-item]
    assert torch.equal(found, some(64, 64))
    del other, found
    gc.collect()
    assert (space.bytes, space.reserved_bytes) == (0, 32768)
    space.take(8192)
    assert space.reserved_bytes == 32768 + 8192


def test_idle_space_is_dropped_where_sizes_change(context: Context, space: ValueSpace) -> None:
    for size in range(4096, 4096 * 20, 4096):
        space.give_back(space.take(size))
        assert space.reserved_bytes <= 2 * size


def test_a_full_drive_says_what_is_missing(context: Context, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    space = ValueSpace(Tier.NVME, [str(tmp_path)], context.engine, context.memory.staging)
    kept = space.take(4096)
    with pytest.raises(
        StoreError, match=r"saved values of a forward need .* bytes more .* beside 4,096 .* activations='keep'"
    ) as e:
        space.reserve([free + (1 << 30)])
    assert e.value.errno == errno.ENOSPC
    space.give_back(kept)
    assert space.take(4096) is kept


def test_a_stand_in_has_metadata_and_refuses_to_be_read(context: Context, space: ValueSpace) -> None:
    (saved,) = away([some(8, 64).t()], context, space)
    assert (saved.shape, saved.stride(), saved.dtype) == ((64, 8), (1, 64), torch.float32)
    assert isinstance(saved.detach(), SavedValue)
    assert "SavedValue" in repr(saved)
    for read in (lambda: saved + 1, saved.clone, lambda: torch.empty(64, 8).copy_(saved)):
        with pytest.raises(UnsupportedModelError, match=r"value 0 of a forward, .* moved to 'nvme': hooks of saved tensors"):
            read()


def test_what_hooks_replaced_is_refused(context: Context) -> None:
    with pytest.raises(UnsupportedModelError, match=r"came back to the backward as a Tensor: hooks of saved tensors"):
        swap_in([some(3)], Tier.DEVICE, context)


def test_damage_on_the_drive_is_noticed(context: Context, space: ValueSpace) -> None:
    saved = away([some(64, 64)], context, space)
    (file,) = saved[0].memory._extent.row.store.files  # type: ignore[union-attr, attr-defined]
    with open(f"/proc/self/fd/{file.fd}", "r+b") as same:
        same.seek(4096)
        same.write(b"\0" * 4096)
    with pytest.raises(StoreError, match="saved value 0"):
        back(saved, context)
