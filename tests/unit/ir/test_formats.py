"""Bytes of stored, sent and accumulated values: plain types, and blocks with scales."""

from __future__ import annotations

import pytest
import torch

from zinf_compile.ir.formats import StateFormat, format_of, is_narrower

INT8_BLOCKS = StateFormat(torch.int8, block=256, scales=torch.float32)


@pytest.mark.parametrize(
    ("stored", "numel", "expected"),
    [
        (format_of(torch.float32), 10, 40),
        (format_of(torch.bfloat16), 10, 20),
        (format_of(torch.float64), 0, 0),
        (INT8_BLOCKS, 0, 0),
        (INT8_BLOCKS, 1, 1 + 4),
        (INT8_BLOCKS, 256, 256 + 4),
        (INT8_BLOCKS, 257, 257 + 8),  # the last block has one element, and a scale
        (INT8_BLOCKS, 1000, 1000 + 16),
        (StateFormat(torch.uint8, block=64, scales=torch.bfloat16), 130, 130 + 6),
        (StateFormat(torch.int8, scales=torch.float32), 3, 15),  # a scale for each element
    ],
)
def test_bytes(stored: StateFormat, numel: int, expected: int) -> None:
    assert stored.bytes(numel) == expected


@pytest.mark.parametrize("stored", [format_of(torch.float32), format_of(torch.int8), INT8_BLOCKS])
def test_what_fits_is_the_most_that_fits(stored: StateFormat) -> None:
    for size in (*range(12), *range(255, 270), *range(510, 530), 4096):
        numel = stored.numel_within(size)
        assert stored.bytes(numel) <= size < stored.bytes(numel + 1)


def test_an_element_has_its_share_of_a_scale() -> None:
    assert format_of(torch.bfloat16).bytes_per_element == 2
    assert INT8_BLOCKS.bytes_per_element == 1 + 4 / 256


def test_a_real_tensor_takes_as_many() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool):
        assert format_of(dtype).bytes(7) == torch.empty(7, dtype=dtype).nbytes


def test_equal_ones_are_one_key() -> None:
    assert {format_of(torch.float32): 1}[StateFormat(torch.float32)] == 1
    assert format_of(torch.int8) != INT8_BLOCKS


@pytest.mark.parametrize(("block", "scales"), [(0, torch.float32), (-1, None), (256, None)])
def test_blocks_that_mean_nothing(block: int, scales: torch.dtype | None) -> None:
    with pytest.raises(ValueError, match="block"):
        StateFormat(torch.int8, block=block, scales=scales)


def test_narrower() -> None:
    assert is_narrower(torch.bfloat16, torch.float32)
    assert not is_narrower(torch.bfloat16, torch.float16)
