"""Trainings that go on from a checkpoint within a cap that was too small for its default tiles."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from capped_blocks import take_step
from capped_stack import ALL_AWAY, WIDTHS, Stack, default_tile, named_by, partitioned, seeded, tiles_of, too_small
from edited_manifests import edit
from tiers import context_of
from training import adamw

import zinf_compile
from zinf_compile.errors import BudgetError, CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

STEPS = 2


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    given = {**ALL_AWAY, "nvme": str(tmp_path_factory.mktemp("drive"))}
    return {**given, "device_memory": too_small(given), "compute": "fx", "compute_shape": {"piece_numel": 1 << 18}}


def steps(model: Stack, optimizer: torch.optim.Optimizer, *, rows: int = 2, dtype: Any = torch.float32) -> list[float]:
    batch = torch.ones(rows, model.width, dtype=dtype)
    return [loss for _ in range(STEPS) for loss in take_step(model, optimizer, [batch])]


def compiled(model: Stack, options: dict[str, Any]) -> tuple[Stack, torch.optim.Optimizer]:
    model.compile(backend="zero_infinity", options=options)
    return model, adamw(model.parameters())


def on_meta() -> Stack:
    with torch.device("meta"):
        return Stack(*WIDTHS)


def start_anew() -> None:
    """As a new process would."""
    gc.collect()
    torch.compiler.reset()
    zinf_compile.reset()


@pytest.mark.parametrize("first", ["partitioned", "whole"])
@pytest.mark.parametrize("then", ["partitioned", "on meta", "renamed"])
def test_it_goes_on_within_the_same_cap(first: str, then: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With the same tiles, and so the same numbers. The optimizer has as many buffers as one that was never loaded."""
    model, optimizer = compiled(seeded() if first == "whole" else partitioned(options), options)
    steps(model, optimizer)
    tiles, taken = tiles_of(model), context_of(model).memory.host_ledger.now()["states"]
    zinf_compile.save(tmp_path, model, optimizer)
    expected = steps(model, optimizer)
    del model, optimizer
    start_anew()

    model, optimizer = compiled(on_meta() if then == "on meta" else partitioned(options), options)
    if then == "renamed":
        model.sections, model.layers = model.layers, torch.nn.ModuleList()
        zinf_compile.load(tmp_path, model, optimizer, rename=lambda name: name.replace("layers", "sections"))
        model.layers = model.sections
    else:
        zinf_compile.load(tmp_path, model, optimizer)
    assert tiles_of(model) == tiles != {default_tile(options["device_memory"])}
    if then == "partitioned":  # what is read in between takes no room of the first graph
        assert zinf_compile.full_optimizer_state_dict(optimizer)["state"]
    assert steps(model, optimizer) == expected
    assert context_of(model).memory.host_ledger.now()["states"] == taken
    zinf_compile.save(tmp_path / "again", model, optimizer, wait=True)
    (manifest,) = (tmp_path / "again").glob("*/manifest.json")
    (described,) = json.loads(manifest.read_text())["settings"]["tiles"]
    assert described["tile"] == next(iter(tiles))


def test_other_caps_have_their_own_tiles(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = compiled(partitioned(options), options)
    steps(model, optimizer)
    zinf_compile.save(tmp_path, model, optimizer, wait=True)
    del model, optimizer
    start_anew()
    larger = {**options, "device_memory": 8 * options["device_memory"]}
    model, optimizer = compiled(partitioned(larger), larger)
    zinf_compile.load(tmp_path, model, optimizer)
    steps(model, optimizer)
    assert tiles_of(model) == {default_tile(larger["device_memory"])}


def test_a_model_that_was_used_keeps_its_tiles(options: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is cut under a graph: the checkpoint is loaded into the tiles that are there."""
    model, optimizer = compiled(partitioned(options), options)
    steps(model, optimizer)
    zinf_compile.save(tmp_path, model, optimizer, wait=True)
    expected = steps(model, optimizer)
    tiles = tiles_of(model)
    zinf_compile.load(tmp_path, model, optimizer)
    assert tiles_of(model) == tiles
    assert steps(model, optimizer) == expected


def test_a_checkpoint_without_tiles(options: dict[str, Any], tmp_path: Path) -> None:
    """As an earlier version has saved it: the refusal names the tiles, and with those it goes on."""
    model, optimizer = compiled(partitioned(options), options)
    steps(model, optimizer)
    (tile,) = tiles_of(model)
    saved = zinf_compile.save(tmp_path, model, optimizer, wait=True)
    expected = steps(model, optimizer)
    edit(saved / "manifest.json", lambda manifest: manifest["settings"].pop("tiles"))
    del model, optimizer
    start_anew()
    model, optimizer = compiled(partitioned(options), options)
    zinf_compile.load(tmp_path, model, optimizer)
    with pytest.raises(BudgetError, match=rf"With tiles of {tile:,} bytes it fits .* give option tile={tile} where") as caught:
        steps(model, optimizer)
    assert f"{options['device_memory']:,} are allowed" in str(caught.value)
    del model, optimizer
    start_anew()
    given = {**options, "tile": tile}
    model, optimizer = compiled(partitioned(given), given)
    zinf_compile.load(tmp_path, model, optimizer)
    assert steps(model, optimizer) == expected


def test_a_graph_that_needs_more_is_cut_further(options: dict[str, Any], tmp_path: Path) -> None:
    """As long as no states were loaded; after that a refusal names the tiles."""
    model, optimizer = compiled(partitioned(options), options)
    steps(model, optimizer)
    (tile,) = tiles_of(model)
    zinf_compile.save(tmp_path, model, optimizer, wait=True)
    del model, optimizer
    for loads in ("values", "states"):
        start_anew()
        model, optimizer = compiled(partitioned(options), options)
        zinf_compile.load(tmp_path, model, *([optimizer] if loads == "states" else []))
        if loads == "values":
            steps(model, optimizer, rows=256)
            (smaller,) = tiles_of(model)
            assert smaller is not None
            assert smaller < tile
        else:
            with pytest.raises(BudgetError, match=rf"With tiles of {smaller:,} bytes it fits"):
                steps(model, optimizer, rows=256)


def test_a_load_onto_meta_that_failed_leaves_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = compiled(partitioned(options), options)
    steps(model, optimizer)
    saved = zinf_compile.save(tmp_path / "good", model, optimizer, wait=True)
    expected = steps(model, optimizer)
    del model, optimizer
    damaged = Path(shutil.copytree(saved, tmp_path / "damaged"))
    (file,) = damaged.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    start_anew()
    model, optimizer = compiled(on_meta(), options)
    with pytest.raises(CheckpointError):
        zinf_compile.load(damaged, model, optimizer)
    zinf_compile.load(tmp_path / "good", model, optimizer)
    assert steps(model, optimizer) == expected


@pytest.mark.parametrize("kind", ["master", "reduced"])
def test_states_in_memory_are_counted_once(kind: str, tmp_path: Path) -> None:
    """A training goes on within the cap that it had, after states were loaded in its middle or before its first graph."""
    given: dict[str, Any] = {"compute": "fx"} | ({"master": "float32"} if kind == "master" else {"reduce_dtype": "bfloat16"})
    dtype = torch.bfloat16 if kind == "master" else torch.float32

    def made(cap: int) -> tuple[Stack, torch.optim.Optimizer]:
        start_anew()
        options = {**given, "device_memory": cap}
        return compiled(partitioned(options, dtype=dtype), options)

    cap, model, optimizer = 1 << 20, None, None
    while model is None:
        try:
            model, optimizer = made(cap)
            steps(model, optimizer, dtype=dtype)
        except BudgetError as error:
            cap, model = named_by(str(error)), None
    assert optimizer is not None
    zinf_compile.save(tmp_path, model, optimizer, wait=True)
    optimizer.load_state_dict(optimizer.state_dict())
    expected = steps(model, optimizer, dtype=dtype)
    del model, optimizer
    model, optimizer = made(cap)
    zinf_compile.load(tmp_path, model, optimizer)
    assert steps(model, optimizer, dtype=dtype) == expected
