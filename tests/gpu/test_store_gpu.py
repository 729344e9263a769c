"""The store moves GPU tensors through pinned staging buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zinf_compile.runtime.storage.extent_store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),
]


def test_round_trips_of_gpu_tensors(tmp_path: Path) -> None:
    value = torch.randn(3_000_001, device="cuda")
    with Store(tmp_path, [("x", value.nbytes)], staging_bytes=8 << 20) as store:
        for step in range(3):
            store.write("x", value + step)
            into = torch.zeros_like(value)
            store.read("x", into).wait()
            assert into.equal(value + step)
        buffer = store.staging.take(4096)
        assert buffer is not None
        assert buffer.is_pinned()


def test_a_read_comes_after_what_its_stream_did_before(tmp_path: Path) -> None:
    value = torch.randn(1 << 20, device="cuda")
    with Store(tmp_path, [("x", value.nbytes)]) as store, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        store.write("x", value).wait()
        into = torch.empty_like(value)
        for _ in range(100):
            into.add_(1)
        store.read("x", into).wait()
        assert into.equal(value)
