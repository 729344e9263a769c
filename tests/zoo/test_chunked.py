"""Models that others wrote train with their losses in chunks as in eager PyTorch, within rounding."""

from __future__ import annotations

import logging

import pytest

from .architectures import ARCHITECTURES, WORDS
from .building import rounded_little
from .test_compiled import sgd
from .train import train_without_fallback

FAST = ["bart", "gemma2"]

WHOLE = {
    "its logits are returned",
    "its logits are used elsewhere",
    "its logits don't come from a linear layer",  # whisper's ctc loss, a graph that begins with the logits
}

CHUNKED = [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in ARCHITECTURES]


# What Dynamo says about code that it can trace and does.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", CHUNKED)
def test_an_architecture_trains_with_its_loss_in_chunks(name: str, caplog: pytest.LogCaptureFixture) -> None:
    row = ARCHITECTURES[name]
    with caplog.at_level(logging.INFO, "zinf_compile"):
        alive = train_without_fallback(
            rounded_little(name),
            as_aot_eager=bool(row.as_aot_eager),
            fullgraph=not row.breaks,
            optimizer=sgd,
            chunk_loss=True,
            chunk_bytes=4 * WORDS * 7,
        )
    assert alive > 0.5
    if name in FAST:
        assert "chunk_loss leaves" not in caplog.text
