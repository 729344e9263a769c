"""`mode=` and settings: what Inductor is asked for reaches the compilation of each region, and regions of two stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Mlp, vectors
from torch import fx
from torch._inductor import config as inductor_config
from training import twins, whole_gradient

from zinf_compile.backend import regions as inductor
from zinf_compile.backend.regions import InductorRegions

AUTOTUNED = "max-autotune-no-cudagraphs"


_found: set[tuple[bool, bool]] = set()


def look(graph: fx.Graph) -> None:
    """Note what a pass of Inductor's finds; one function, as another one asks for regions of its own."""
    _found.add((inductor_config.max_autotune, inductor_config.triton.cudagraphs))


def compiled_with(settings: dict[str, Any]) -> set[tuple[bool, bool]]:
    """Train one step near eager; return (max_autotune, CUDA graphs) as Inductor's passes over the regions found them."""
    _found.clear()
    eager, ours = twins(Mlp)
    ours.compile(backend="zero_infinity", **settings)
    with inductor_config.patch(post_grad_custom_post_pass=look, fx_graph_cache=False):
        losses = [model(*vectors(0)) for model in (eager, ours)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole_gradient(other), one.grad, rtol=1e-5, atol=1e-6)
    return set(_found)


@pytest.mark.slow
def test_each_region_is_compiled_as_the_mode_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_shared", {})
    assert compiled_with({"mode": AUTOTUNED}) == {(True, False)}
    torch.compiler.reset()
    assert compiled_with({"options": {"compute": "inductor"}}) == {(False, False)}, "another mode's regions were taken"
    torch.compiler.reset()
    assert compiled_with({"options": {"compute": "inductor", "mode": AUTOTUNED}}) == set(), "they are there already"


def test_regions_of_two_modes_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda region, *, mode, **_: modes.append(mode))
    monkeypatch.setattr(inductor, "_shared", {})
    for mode in ("default", AUTOTUNED, "default"):
        regions = InductorRegions(mode=mode)
        regions.collect(region(), backward=False)
        regions.compile(rank=0, ranks=1)
    assert modes == ["default", AUTOTUNED]


def test_regions_of_other_settings_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Inductor's, and of PyTorch's that decide its code, as a user switches them on after some steps."""
    compiled: list[bool] = []
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda region, **_: compiled.append(_settings()))
    monkeypatch.setattr(inductor, "_shared", {})

    def compile_one() -> None:
        regions = InductorRegions()
        regions.collect(region(), backward=False)
        regions.compile(rank=0, ranks=1)

    def _settings() -> bool:
        return inductor_config.emulate_precision_casts or torch.are_deterministic_algorithms_enabled()

    try:
        for deterministic in (False, True, False):
            torch.use_deterministic_algorithms(deterministic)
            compile_one()
    finally:
        torch.use_deterministic_algorithms(False)
    for emulate in (False, True, False):
        with inductor_config.patch(emulate_precision_casts=emulate):
            compile_one()
    assert compiled == [False, True, True]


def region() -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    return make_fx(lambda x: (x.relu(),), tracing_mode="fake")(torch.zeros(3))
