"""The caps that refusals name: given as they are, they train, any larger one does, and a byte less does not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from capped_stack import ALL_AWAY, Stack, named_by, refusal_of, train
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import more
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.backend.graph_compiler import _Measurer
from zinf_compile.cli.models import GPT
from zinf_compile.errors import BudgetError
from zinf_compile.ir.compute_shape import piece_of
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.shortage import find_smallest, smaller_tiles

tiers = st.sampled_from(["device", "nvme"])


@pytest.mark.parametrize("examples", [4, more(60)])
def test_exactly_the_bytes_that_are_named_train(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=examples < 10, database=None)
    @given(
        widths=st.lists(st.sampled_from([64, 300, 768, 1000, 1500]), min_size=2, max_size=4),
        tied=st.booleans(),
        away=st.one_of(st.just(ALL_AWAY), st.fixed_dictionaries(dict.fromkeys(ALL_AWAY, tiers))),
        tile=st.sampled_from([None, None, 1 << 18]),
        cap=st.sampled_from([1, 4 << 20, 8 << 20]),
        larger=st.floats(1.0, 4.0),
    )
    def check(widths: list[int], tied: bool, away: dict[str, str], tile: int | None, cap: int, larger: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {**away, **({"nvme": folder} if "nvme" in away.values() else {})}
            if tile is not None:
                options["tile"] = tile
            said = refusal_of(Stack(*widths, tied=tied), {**options, "device_memory": cap})
            if said:
                assert "nvme" not in said or set(away.values()) != {"nvme"}, "where everything is there already"
                least = named_by(said)
                train(Stack(*widths, tied=tied), {**options, "device_memory": least})
                assert refusal_of(Stack(*widths, tied=tied), {**options, "device_memory": least - 1})
                train(Stack(*widths, tied=tied), {**options, "device_memory": int(larger * least)}, steps=1)

    check()


def test_the_cap_that_is_named_trains_parameters_in_another_order(tmp_path: Path) -> None:
    """A step in this order would take larger chunks than one in the order of the graph, for which it was named."""

    def backwards(parameters: Any) -> torch.optim.Optimizer:
        return adamw(list(parameters)[::-1])

    widths = (300, 500, 64)
    options = {"params": "nvme", "nvme": str(tmp_path), "tile": 1 << 18}
    least = named_by(refusal_of(Stack(*widths), {**options, "device_memory": 1}))
    train(Stack(*widths), {**options, "device_memory": least}, kind=backwards)


def test_pieces_follow_from_the_cap_that_is_named(tmp_path: Path) -> None:
    """Of 33 M parameters they have more elements under the cap that works than under the one that was asked for."""
    options = {"params": "device", "grads": "device", "optimizer": "nvme", "nvme": str(tmp_path), "compute_shape": {}}
    model = Stack(4096, 4096, 4096)
    least = named_by(refusal_of(model, {**options, "device_memory": 1}))
    assert piece_of(1 << 25, least) > piece_of(1 << 25, 1)
    assert named_by(refusal_of(model, {**options, "device_memory": least - 1})) == least
    train(model, {**options, "device_memory": least}, steps=1)


@pytest.mark.parametrize(
    ("floor", "ranges", "expected"),
    [
        (6, {0: 7, 1: 8, 2: 30, 3: 31}, 7),
        (6, {0: 11, 1: 25, 2: 30, 3: 31}, 30),
        (6, {0: 11, 1: 12, 2: 30, 3: 31}, 12),
        (6, {0: 99, 1: 99, 2: 3}, 20),
        (45, {0: 8, 1: 9, 2: 15, 3: 18}, 8),
        (45, {0: 99, 1: 18, 2: 15, 3: 31}, 18),
        (45, {0: 99, 1: 25, 2: 15, 3: 31}, 20),
        (45, {3: 50}, 50),
    ],
)
def test_the_smallest_cap_is_found_where_needs_grow_with_it(floor: int, ranges: dict[int, int], expected: int) -> None:
    """Caps from 0, 10, 20, 40 bytes on have tiles of one size, and need so much; less than the floor, where homes are open."""
    borders = [0, 10, 20, 40, 80]

    def edges(cap: int) -> tuple[int, int]:
        number = next(n for n in range(4) if cap < borders[n + 1])
        return borders[number], borders[number + 1]

    found = find_smallest(lambda cap: ranges[borders.index(edges(cap)[0])], floor=floor, edges=edges)
    assert found == expected


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({8: 40, 4: 30, 2: 20}, (20, 2)),
        ({8: 40, 4: 38, 2: 20}, (20, 2)),
        ({8: 40, 4: 38, 2: 37, 1: 10}, (37, 2)),
        ({8: 40, 4: 41, 2: 42, 1: 10}, (40, 8)),
        ({16: 50, 8: 50, 4: 50, 2: 20}, (20, 2)),
        ({8: 9, 4: 5, 2: 1}, (2, 2)),
        ({}, (50, 50)),
    ],
    ids=["each saves much", "one saves little", "two save little", "two save nothing", "uncut", "not below their range", "none"],
)
def test_tiles_are_halved_while_that_saves_much(needs: dict[int, int], expected: tuple[int, int]) -> None:
    *_, found = (50, 50), *smaller_tiles(needs.__getitem__, 50, needs)
    assert found == expected


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    """Keep more states than Adam, which the first call can't know."""
    return torch.optim.AdamW(parameters, amsgrad=True, fused=True)


@pytest.mark.parametrize("option", ["device_memory", "host_memory"])
def test_later_refusals_name_what_works_as_well(option: str) -> None:
    """The step, or a second backward, says what works with all states and second gradients: of the option that was given."""
    widths = (300, 300, 64)
    first = named_by(refusal_of(Stack(*widths), {option: 1}), option)
    said = refusal_of(Stack(*widths), {option: first}, kind=amsgrad)
    least = named_by(said, option)
    train(Stack(*widths), {option: least}, kind=amsgrad)
    assert refusal_of(Stack(*widths), {option: least - 1}, kind=amsgrad)


def test_a_loop_that_looks_for_a_batch_size_finds_one() -> None:
    """accelerate's, which transformers' Trainer takes, knows errors by their class and words."""
    search = pytest.importorskip("accelerate.utils").find_executable_batch_size
    tried = []

    def attempt(batch_size: int) -> int:
        tried.append(batch_size)
        torch.compiler.reset()
        model = Stack(64, 300, 64)
        model.compile(backend=BACKEND, options={"compute": "fx", "device_memory": "2MiB"})
        model(torch.ones(batch_size, 64)).backward()
        return batch_size

    assert search(attempt, starting_batch_size=4000)() == tried[-1] < tried[0] == 4000
    said = refusal_of(Stack(300, 300, 64), {"device_memory": 1000})
    assert "out of memory" not in said, "no batch is small enough"


def test_an_evaluation_between_two_backwards_takes_no_room_from_gradients() -> None:
    """It computes more at once than a backward, but never beside second gradients."""
    widths = (300, 300, 64)
    least = named_by(refusal_of(Stack(*widths), {"device_memory": 1}))
    train(Stack(*widths), {"device_memory": least}, evaluated=64)


def test_later_refusals_name_both_options_where_both_allow_too_little() -> None:
    widths = (300, 300, 64)
    first = named_by(refusal_of(Stack(*widths), {"device_memory": 1}))
    said = refusal_of(Stack(*widths), {"device_memory": first, "host_memory": first}, kind=amsgrad)
    caps = {"device_memory": named_by(said), "host_memory": named_by(said, "host_memory")}
    train(Stack(*widths), caps, kind=amsgrad)
    for larger, named in (("host_memory", "device_memory"), ("device_memory", "host_memory")):
        said = refusal_of(Stack(*widths), {named: first, larger: 3 << 20}, kind=amsgrad)
        assert named in said
        assert larger not in said


@pytest.mark.parametrize("side", ["device_memory", "host_memory"])
def test_caps_of_a_device_with_memory_of_its_own_are_named_together(side: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {**ALL_AWAY, "params": "host", "nvme": tmp_path}
    with simulating(SimulatedDevice()):
        said = refusal_of(Stack(300, 300, 64), {**options, "device_memory": 1, "host_memory": 1})
        caps = {"device_memory": named_by(said), "host_memory": named_by(said, "host_memory")}
        assert said.count("Params on 'nvme' keep less there") == 1, "of host memory; grads and states are there already"
        train(Stack(300, 300, 64), {**options, **caps})
        assert refusal_of(Stack(300, 300, 64), {**options, **caps, side: caps[side] - 1})


def test_no_word_is_advised_for_what_was_decided_with_a_drive_to_choose_from(tmp_path: Path) -> None:
    model = Stack(300, 300, 64)
    assert "keep less there" not in refusal_of(model, {"nvme": tmp_path, "device_memory": 1})
    said = refusal_of(model, {"nvme": tmp_path, "params": "device", "device_memory": 1})
    assert ". Params on 'nvme' keep less there" in said, "grads and states were decided"
    assert "Params, grads and optimizer on 'nvme'" in refusal_of(model, {"device_memory": 1})


def read_all(optimizer: torch.optim.Optimizer) -> object:
    return optimizer.state_dict()


def read_two(optimizer: torch.optim.Optimizer) -> object:
    return [list(state.values()) for state in optimizer.state.values()]


def read_whole(optimizer: torch.optim.Optimizer) -> object:
    return zinf_compile.full_optimizer_state_dict(optimizer)


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize("read", [read_all, read_two, read_whole])
@pytest.mark.parametrize("option", ["device_memory", "host_memory"])
def test_caps_for_reading_states_from_a_drive(read: Any, option: str, tmp_path: Path) -> None:
    """With what is named as well as with a byte less, a run from its beginning."""
    options: dict[str, Any] = {"optimizer": "nvme", "nvme": tmp_path}

    def said(cap: int) -> str:
        optimizers: list[torch.optim.Optimizer] = []

        def kept(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(adamw(parameters))
            return optimizers[-1]

        model = Stack(200, 300)
        train(model, {**options, option: cap}, steps=1, kind=kept)
        model(torch.ones(2, 200)).backward()
        try:
            read(optimizers[0])
        except BudgetError as error:
            return str(error)
        return ""

    least = named_by(refusal_of(Stack(200, 300), {**options, option: 1}), option)
    refused = said(least)
    assert refused, "the states are on the drive, and there was no room for them in memory"
    works = named_by(refused, option)
    assert not said(works)
    assert named_by(said(works - 1), option) == works


@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
@pytest.mark.parametrize(
    ("widths", "bucket", "more_than", "caps"),
    [
        ((512,) * 12, "32MiB", 32 << 20, []),
        ((512,) * 12, None, 8 << 20, [8 << 20]),
        ((512,) * 8 + (1024, 768), None, 8 << 20, [4 << 20, 8 << 20]),
    ],
    ids=["none is cut", "buckets are", "two are cut"],
)
def test_a_graph_is_traced_once_for_each_way_to_cut_its_parameters(
    widths: tuple[int, ...],
    bucket: str | None,
    more_than: int,
    caps: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Although with each doubling of a cap default tiles are twice as large."""
    traced: list[object] = []
    really = _Measurer.measure

    def measure(compiler: _Measurer, *args: Any, **how: Any) -> Any:
        traced.append(compiler.config.device_memory)
        return really(compiler, *args, **how)

    monkeypatch.setattr(_Measurer, "measure", measure)
    options = {**ALL_AWAY, "nvme": str(tmp_path), "bucket": bucket}
    named = named_by(refusal_of(Stack(*widths), {**options, "device_memory": 1}))
    assert named > more_than
    assert sorted(traced) == caps  # type: ignore[type-var]
    assert refusal_of(Stack(*widths), {**options, "device_memory": named}) == ""
    assert f"{named:,}" in refusal_of(Stack(*widths), {**options, "device_memory": named - 1})


def test_a_head_in_tiles_beside_values_that_are_made_again(tmp_path: Path) -> None:
    """A language model of many words and few layers: what is computed by slices reads what others of its block let go of."""

    def step(cap: int | None) -> torch.Tensor:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        model = GPT(layers=1, width=128, heads=2, vocabulary=4096, length=64)
        tokens, targets = torch.randint(4096, (2, 2, 64))
        if cap is None:
            return model(tokens, targets).detach()
        model.compile(backend="zero_infinity", options={"device_memory": cap, "nvme": str(tmp_path), "compute": "fx"})
        loss = model(tokens, targets)
        loss.backward()
        adamw(model.parameters()).step()
        return loss.detach()

    expected = step(None)
    named = set()
    for cap in (5 << 20, 6 << 20, 9 << 20):
        with pytest.raises(BudgetError) as refused:
            step(cap)
        named.add(named_by(str(refused.value)))
    (least,) = named
    torch.testing.assert_close(step(least), expected, rtol=1e-5, atol=0.0)  # sums over slices of the words
    with pytest.raises(BudgetError):
        step(least - 1)
