"""Models made partitioned: the numbers of building them whole with the same seed, then trained like any other."""

from __future__ import annotations

import copy
import functools
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_from_meta
import torch
from marks import more
from models import CASES, WORDS, Block
from rank_from_meta import REBUILT, assert_born, built_inside, made_on_meta
from ranks import run_ranks
from tiers import PLACEMENTS, compiled, context_of, options_for
from torch import nn
from torch.nn import functional as F
from training import BACKEND, adamw, assert_same, plain_step
from transformer_models import bert, gpt2, llama, mixtral, qwen2, t5, vit

import zinf_compile
from zinf_compile.errors import BudgetError, OptionError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

Build = Callable[[], nn.Module]
HF: dict[str, Build] = {"gpt2": gpt2, "llama": llama, "qwen2": qwen2, "bert": bert, "t5": t5, "mixtral": lambda: mixtral("eager")}


@pytest.mark.parametrize("name", [*REBUILT, *HF])
def test_a_model_made_on_meta_has_the_numbers_of_one_built_whole(name: str) -> None:
    assert_born({**REBUILT, **HF}[name], made_on_meta)


@pytest.mark.parametrize(
    "name", ["tied", "odd_shapes", "mutated_buffers", "returns_parameters", "attention", "gpt2", "t5", "vit"]
)
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_model_built_inside_partitioned_has_them_too(name: str, tier: str, tmp_path: Path) -> None:
    builds: dict[str, Build] = {**{name: case.build for name, case in CASES.items()}, **HF, "vit": vit}
    options = {"params": "nvme", "nvme": tmp_path} if tier == "nvme" else {}
    assert_born(builds[name], functools.partial(built_inside, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("birth", [made_on_meta, built_inside])
def test_sixteen_bits(birth: Callable[..., Any], dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return llama()
        finally:
            torch.set_default_dtype(before)

    assert_born(build, birth)


def test_code_inside_partitioned_may_initialise_tie_copy_and_convert() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(WORDS, 8)
            self.blocks = nn.ModuleList([Block(8)])
            self.blocks.append(copy.deepcopy(self.blocks[0]))
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
            self.head = nn.Linear(8, WORDS, bias=False)
            self.embedding.weight = self.head.weight  # the other way round than `partition` takes it to be
            self.apply(self._scale)
            nn.init.orthogonal_(self.blocks[0].up.weight)
            self.blocks[1].up.weight.data = self.blocks[0].up.weight.data * 2
            with torch.no_grad():
                self.blocks[1].down.weight[2:5].copy_(self.blocks[0].down.weight[:3])
            self.bfloat16()
            self.blocks[0].requires_grad_(False)

        def _scale(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(0.0, 0.02)

    _, ours = assert_born(Odd, built_inside)
    assert ours.embedding.weight is ours.head.weight
    assert not ours.blocks[0].up.weight.requires_grad


def test_init_is_called_with_each_module_children_first() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.scale = nn.Parameter(torch.ones(5))
            self.register_buffer("steps", torch.zeros(3))

    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, Scaled):
            nn.init.constant_(module.scale, 2.0)
            module.steps.copy_(torch.arange(3))
            module.layer.weight.mul_(module.scale)
            module.layer.bias = nn.Parameter(torch.full((5,), 7.0))

    torch.manual_seed(3)
    whole = Scaled()
    whole.apply(torch.no_grad()(init))
    with torch.device("meta"):
        ours = Scaled()
    seen.clear()
    torch.manual_seed(3)
    zinf_compile.partition(ours, init=init)
    assert seen == ["Linear", "Scaled"]
    for name, value in zinf_compile.full_state_dict(ours).items():
        assert_same(name, whole.state_dict()[name], value)


def test_an_optimizer_made_before_stays_valid_and_tied_weights_stay_tied() -> None:
    with torch.device("meta"):
        model = CASES["tied"].build()
    before = list(model.parameters())
    before[0].marked = True  # type: ignore[attr-defined]
    zinf_compile.partition(model)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert {type(p) for p in before} == {ShardedParameter}
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.marked


@pytest.mark.keeps_graphs
@pytest.mark.parametrize("spelling", ["in place", "wrapped"])
@pytest.mark.parametrize("name", ["tied", "frozen", "attention"])
@pytest.mark.parametrize("birth", [made_on_meta, built_inside])
@pytest.mark.parametrize("told", [True, False], ids=["told twice", "told once"])
def test_training_is_eagers(birth: Callable[..., Any], name: str, spelling: str, told: bool, drive: Path) -> None:
    case, options = CASES[name], options_for(("nvme", "nvme", "nvme"), drive)
    eager, ours = (build(case.build) for build in (rank_from_meta.built_whole, functools.partial(birth, **options)))
    again = options if told else {}
    run: Any = compiled(ours, again) if spelling == "in place" else torch.compile(ours, backend=BACKEND, options=again)
    sides = [(model, adamw(model.parameters())) for model in (eager, run)]
    for step in range(3):
        losses = [plain_step(model, optimizer, case.batch(step, 0)) for model, optimizer in sides]
        assert_same(f"loss {step}", *losses)
    for key, value in zinf_compile.full_state_dict(ours).items():
        assert_same(key, eager.state_dict()[key], value)


@pytest.mark.parametrize("placement", PLACEMENTS[::5], ids=str)
def test_each_tier_of_a_device_with_memory_of_its_own(placement: tuple[str, str, str], tmp_path: Path) -> None:
    case = CASES["tied"]
    eager = rank_from_meta.built_whole(case.build)
    with simulating(SimulatedDevice()):
        ours = compiled(made_on_meta(case.build, **options_for(placement, tmp_path)), {})
        sides = [(model, adamw(model.parameters())) for model in (eager, ours)]
        for step in range(2):
            assert_same("loss", *[plain_step(model, optimizer, case.batch(step, 0)) for model, optimizer in sides])
        for key, value in zinf_compile.full_state_dict(ours).items():
            assert_same(key, eager.state_dict()[key], value)


def test_options_that_contradict_where_the_model_was_put_are_an_error(tmp_path: Path) -> None:
    case = CASES["mlp"]
    ours = made_on_meta(case.build, params="nvme", nvme=tmp_path)
    with pytest.raises(OptionError, match=r"option params='device', but parameter .* was partitioned with params='nvme'"):
        compiled(ours, {"params": "device"})(*case.batch(0, 0))
    torch.compiler.reset()
    assert torch.isfinite(compiled(ours, {})(*case.batch(0, 0)))


def test_one_graph_serves_models_that_live_in_different_places(tmp_path: Path) -> None:
    case = CASES["mlp"]

    def run(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model.second(model.first(x)), y)

    run = torch.compile(run, backend=BACKEND)
    near = run(made_on_meta(case.build), *case.batch(0, 0))
    far = run(made_on_meta(case.build, params="nvme", grads="nvme", nvme=tmp_path), *case.batch(0, 0))
    assert_same("loss", near, far)
    far.backward()


@pytest.mark.parametrize("birth", [made_on_meta, built_inside])
def test_no_more_than_one_module_is_ever_whole(birth: Callable[..., Any], tmp_path: Path) -> None:
    """By the runtime's account, and by what the process takes."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(600, 1000), *[nn.Linear(1000, 1000) for _ in range(30)])

    largest = (1000 + 1) * 1000 * 4
    context = context_of(made_on_meta(CASES["mlp"].build))
    context.memory.host_ledger.forget_peaks()
    peak, data = forgotten_peak(), memory_of("VmData")
    model = birth(build, params="nvme", grads="nvme", nvme=tmp_path)
    if birth is made_on_meta:  # what code inside `partitioned` allocates is its own business
        assert memory_of("VmData") - data < 45 << 20, "what RLIMIT_DATA counts, touched or not"
    assert 0 < context.memory.host_ledger.peak()["staging"] <= largest
    assert peak() < 45 << 20, "of 120 MB"
    assert context.memory.host_ledger.now()["staging"] == 0
    del model


def test_no_more_than_one_module_of_transformers_is_ever_whole(tmp_path: Path) -> None:
    context = context_of(made_on_meta(CASES["mlp"].build))
    context.memory.host_ledger.forget_peaks()
    model = made_on_meta(gpt2, params="nvme", nvme=tmp_path)
    own = [sum(p.numel() * 4 for p in module.parameters(recurse=False)) for module in model.modules()]
    assert 0 < context.memory.host_ledger.peak()["staging"] <= max(own)


def test_a_transformers_model_saves_what_plain_transformers_loads(tmp_path: Path) -> None:
    model: Any = made_on_meta(gpt2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    expected = rank_from_meta.built_whole(gpt2)
    for name, value in loaded.state_dict().items():
        assert_same(name, expected.state_dict()[name], value)


def test_a_view_that_somebody_holds_stays_the_value() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
        first, last = model[0].weight.data, model[2].weight[1:3].detach()
        model[1].weight.data.fill_(7.0)
        with torch.no_grad():
            last.copy_(model[1].weight[:2, :1].expand(2, 5))
            first.add_(model[1].bias[0])
            model[2].bias.zero_()
            last.mul_(2)
        return model

    assert_born(build, built_inside)


def test_what_has_no_nan_and_is_initialised_in_part_is_zero_elsewhere(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)

        def reset_parameters(self) -> None:
            self.table.data[0] = 1

    for options in ({}, {"params": "nvme", "nvme": tmp_path}):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), Table(), nn.Linear(64, 64), Table())
        zinf_compile.partition(model, **options)  # type: ignore[arg-type]
        state = zinf_compile.full_state_dict(model)
        assert all(int(state[f"{number}.table"].sum()) == 64 for number in (1, 3))


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_parameters_may_be_replaced_while_somebody_holds_their_values(tier: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
        old = model[0].weight.detach()
        model[0].weight = nn.Parameter(torch.cat([old, old]))
        nn.init.normal_(model[1].weight)
        gone: Any = nn.Linear(30, 30)
        held, gone = gone.weight.data, None
        model[1].weight.data.mul_(2)
        model[1].bias.data.add_(held.sum())
        return model

    assert_born(build, functools.partial(built_inside, **({"params": tier, "nvme": tmp_path} if tier == "nvme" else {})))


def test_a_view_held_while_later_modules_are_made_stays_the_value_on_a_drive(tmp_path: Path) -> None:
    held: list[torch.Tensor] = []

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                for view in held:
                    view.add_(1)  # what was put away, and may be on its way to the drive
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
            held.append(module.weight.data)

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(5)])
    zinf_compile.partition(model, init=initialise, params="nvme", nvme=tmp_path)
    for number, value in enumerate(zinf_compile.full_state_dict(model).values()):
        if not number % 2:
            assert torch.equal(value, torch.full((300, 300), 5.0 - number // 2))


@pytest.mark.parametrize("birth", [made_on_meta, built_inside])
@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[-1]], ids=str)
def test_the_smallest_cap_is_that_of_a_model_partitioned_at_its_first_call(
    birth: Callable[..., Any], placement: tuple[str, str, str], tmp_path: Path
) -> None:
    case, options = CASES["blocks"], options_for(placement, tmp_path)
    smallest = []
    for build in (rank_from_meta.built_whole, birth):
        torch.compiler.reset()
        gc.collect()  # what other tests left is on the account
        model = build(case.build, **(options if build is birth else {}))
        with pytest.raises(BudgetError) as found:
            compiled(model, {**options, "device_memory": "1KiB"})(*case.batch(0, 0))
        smallest.append(re.search(r"the smallest that works is ([\d,]+)", str(found.value))[1])  # type: ignore[index]
        del model
    assert smallest[0] == smallest[1]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, more(4)])
def test_ranks_make_the_same_model(world_size: int, tmp_path: Path) -> None:
    assert all(run_ranks(rank_from_meta.born_on_ranks, world_size, str(tmp_path)))


def forgotten_peak() -> Callable[[], int]:
    """Let the kernel forget how much memory this process had; return what says how much more it had since, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of("VmRSS")
    return lambda: memory_of("VmHWM") - before


def memory_of(field: str) -> int:
    """Return the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
