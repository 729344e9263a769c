"""A rank's shard as rectangles: all ranks' together are the tensor, whatever its strides, tiles and number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.checkpoint import shard_parts as module
from zinf_compile.checkpoint.shard_parts import memory_order, shard_parts, stretches_of
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiling import borders_of, choose_tiles
from zinf_compile.runtime.units.shard_layout import cut_spans


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    ranks=st.integers(1, 4),
    limit=st.sampled_from([None, 64, 16]),
)
def test_all_shards_are_the_tensor(shape: list[int], data: st.DataObject, ranks: int, limit: int | None) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    numbers = torch.arange(torch.Size(shape).numel())
    inverse = sorted(range(len(order)), key=order.__getitem__)
    tensor = numbers.view([shape[dim] for dim in order]).permute(inverse)  # its memory is `numbers`
    tiles = choose_tiles(shape, tensor.stride(), format_of(torch.float32), limit_bytes=limit, world_size=ranks) if limit else ()
    spans = cut_spans(tensor.numel(), borders_of(tiles)[1:-1], ranks)
    found = torch.full(shape, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_REARRANGED_NUMEL", 7)
        for rank in range(ranks):
            shard = torch.cat([numbers[slice(*span.part_of(rank))] for span in spans])
            end = 0
            for part in shard_parts(tensor.shape, tensor.stride(), stretches_of(spans, rank, tensor.numel())):
                rectangle = part.rectangle
                assert part.start == end
                end += rectangle.numel
                window = found[tuple(slice(o, o + s) for o, s in zip(rectangle.offsets, rectangle.sizes, strict=True))]
                assert (window == -1).all()
                window.copy_(part.rearranged(shard[part.start : end]).view(window.shape))
            assert end == shard.numel()
    assert torch.equal(found, tensor)


def test_tiles_of_one_rank_are_one_rectangle() -> None:
    tiles = choose_tiles((64, 8), (8, 1), format_of(torch.float32), limit_bytes=512, world_size=1)
    spans = cut_spans(512, borders_of(tiles)[1:-1], 1)
    assert len(spans) > 1
    assert [part.rectangle.sizes for part in shard_parts((64, 8), (8, 1), stretches_of(spans, 0, 512))] == [(64, 8)]


def test_padding_is_no_part_of_the_tensor() -> None:
    spans = cut_spans(12, (), 3)
    assert [stretches_of(spans, rank, 7) for rank in range(3)] == [[(0, 4, 0)], [(4, 7, 0)], []]


@pytest.mark.parametrize(
    ("shape", "stride", "order"),
    [
        ((3, 4), (4, 1), None),
        ((3, 4), (1, 3), (1, 0)),
        ((1, 4), (1, 1), None),
        ((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1)),
        ((), (), None),
    ],
)
def test_order_in_memory(shape: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...] | None) -> None:
    assert memory_order(shape, stride) == order
