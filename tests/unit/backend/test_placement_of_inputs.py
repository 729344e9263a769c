"""Options of a compiled call beside those with which its parameters were partitioned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile import OptionError
from zinf_compile.backend.placement_of_inputs import follow_units, with_piece
from zinf_compile.config import Config

PIECES = {"compute_shape": {"piece_numel": 300}}


def partitioned(**options: Any) -> list[nn.Parameter]:
    with torch.device("meta"):
        model = nn.Linear(20, 30)
    return list(zinf_compile.partition(model, **options).parameters())


def followed(inputs: list[nn.Parameter], **options: Any) -> Config:
    return with_piece(follow_units(Config.from_options(options), tuple(options), inputs), inputs, 630)


@pytest.mark.parametrize(
    "asked", [{"piece_numel": 400}, {"piece_numel": 400, "chunk_bytes": 7}, {"piece_numel": 4 << 20}], ids=str
)
def test_pieces_of_another_size_than_the_units_have_are_refused(asked: dict[str, int], tmp_path: Path) -> None:
    inputs = partitioned(params="nvme", nvme=tmp_path, **PIECES)
    told = (
        f"option compute_shape={{'piece_numel': {asked['piece_numel']}}}, but parameter weight was partitioned with "
        "compute_shape={'piece_numel': 300}: give the option the same value, or omit it"
    )
    with pytest.raises(OptionError, match=re.escape(told)):
        followed(inputs, compute_shape=asked)


def test_pieces_named_for_units_that_have_the_default_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"compute_shape=\{'piece_numel': 300\}, but .* with compute_shape=\{'piece_numel': 262144\}"
    ):
        followed(partitioned(), **PIECES)


def test_the_rest_of_the_compute_shape_is_as_asked_and_pieces_are_those_of_the_units(tmp_path: Path) -> None:
    inputs = partitioned(params="nvme", nvme=tmp_path, **PIECES)
    assert followed(inputs).compute_shape == {"piece_numel": 300}
    assert followed(inputs, **PIECES).compute_shape == {"piece_numel": 300}
    both = followed(inputs, compute_shape={"chunk_bytes": 7})
    assert both.compute_shape == {"chunk_bytes": 7, "piece_numel": 300}
    assert both.params == "auto", "what is new finds a home, and may do so on the units' drives"
    assert both.placement().nvme
    least = followed(partitioned(), compute_shape={"chunk_bytes": 7})
    assert least.compute_shape == {"chunk_bytes": 7, "piece_numel": 1 << 18}


def test_a_shape_that_was_not_given_contradicts_nothing(tmp_path: Path) -> None:
    """A default of the caller's own is no wish of the user's."""
    inputs = partitioned(params="nvme", nvme=tmp_path, **PIECES)
    config = follow_units(Config(compute_shape={"piece_numel": 400}), (), inputs)
    assert with_piece(config, inputs, 630).compute_shape == {"piece_numel": 300}


def test_pieces_that_follow_from_sizes_are_not_compared_between_ranks() -> None:
    """A rank that compiles alone must not ask the others."""
    inputs = partitioned()
    assert follow_units(Config(), (), inputs).signature() == Config().signature()
    assert with_piece(Config(), inputs, 630).shape().piece_numel == 1 << 18


@pytest.mark.parametrize("numel", [630, 10**10])
def test_a_graph_that_is_compiled_again_has_the_signature_of_the_first_time(numel: int) -> None:
    """Ranks find what they have agreed on by it, also one that compiles alone."""
    first = with_piece(Config(), [], numel)
    inputs = partitioned(compute_shape={"piece_numel": first.shape().piece_numel})
    assert with_piece(Config(), inputs, numel).signature() == first.signature()


@pytest.mark.parametrize("kind", ["params", "grads", "optimizer"])
def test_where_the_device_is_host_memory_their_words_mean_the_same(kind: str, tmp_path: Path) -> None:
    """The other kinds have homes of their own to choose, which changes how this one is written down."""
    for word in ("host", "device"):
        options = {kind: word, "nvme": tmp_path}
        followed(partitioned(**options), **options)
        followed(partitioned(**options), **{kind: "device" if word == "host" else "host"})
    with pytest.raises(OptionError, match=f"option {kind}='host', but parameter weight was partitioned with {kind}='nvme'"):
        followed(partitioned(**{kind: "nvme"}, nvme=tmp_path), **{kind: "host"})
