"""Models that can't be partitioned or compiled: each refusal says what, where and what to do, and leaves them as they were."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import IN, WORDS, Mlp, loss_of, vectors
from torch import fx, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import BACKEND, adamw, assert_same, assert_same_models, plain_step, twins, wrapped

import zinf_compile
from zinf_compile import UnsupportedModelError
from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import Program
from zinf_compile.sharded.parameter import ShardedParameter

HERE = re.escape(Path(__file__).name)
library = torch.library.Library("zinf_test", "DEF")
library.define("opaque(Tensor x) -> Tensor")
library.impl("opaque", torch.clone, "CPU")


class Extra(Mlp):
    """Has one more parameter, made by the test, which scales the input."""

    def __init__(self, extra: nn.Parameter) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.extra).real, y)


class Mutating(Mlp):
    """Changes parameters in its forward, in a way that the test gives."""

    def __init__(self, change: Callable[[Mutating], None]) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(13, IN), requires_grad=False)
        self.change = change

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return super().forward(x, y)


class Words(nn.Module):
    """An embedding with the options that the test gives."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, IN, **options)
        self.layer = nn.Linear(IN, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(words)).square().mean()


def assert_refused(
    model: nn.Module, batch: Sequence[Any], message: str, error: type[Exception] = UnsupportedModelError, **settings: Any
) -> None:
    """The first call raises `error` itself; then the model is what it was, and its optimizer trains it eagerly."""
    twin, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), foreach=False)
    before = list(model.parameters())
    compiled: Any = torch.compile(model, **({"backend": BACKEND} | settings))
    with pytest.raises(error, match=message):
        compiled(*batch)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert {type(p) for p in before} <= {nn.Parameter, Subclass}
    assert_same_models(twin, model)
    plain_step(model, optimizer, tuple(batch))
    plain_step(twin, torch.optim.AdamW(twin.parameters(), foreach=False), tuple(batch))
    assert_same_models(twin, model)


class Subclass(nn.Parameter):
    """A parameter of another class."""


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda: nn.Parameter(torch.randn(IN, dtype=torch.complex64)), r"extra, shape \[7\], is complex .*accepted: real"),
        (lambda: Subclass(torch.ones(IN)), r"extra, .* is a .*Subclass; accepted: torch.nn.Parameter"),
        (
            lambda: nn.Parameter(torch.ones(1).expand(IN), requires_grad=False),
            r"extra, .* gaps or overlaps in memory \(strides \(0,\)\).*contiguous\(\)",
        ),
        (
            lambda: nn.Parameter(torch.ones(2 * IN)[::2]),
            r"extra, .* gaps or overlaps in memory \(strides \(2,\)\).*contiguous\(\)",
        ),
    ],
    ids=["complex", "subclass", "expanded", "gapped"],
)
def test_a_parameter_that_is_not_plain_is_refused_by_name(extra: Callable[[], nn.Parameter], message: str) -> None:
    assert_refused(Extra(extra()), vectors(0), message)


@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("place", ["input", "model"])
def test_parameters_without_values_are_refused(place: str, grad: bool) -> None:
    model = Mlp().to("meta")
    batch = [t.to("meta") for t in vectors(0)] if place == "input" else vectors(0)
    found = (UnsupportedModelError, "parameter .* on the meta device and has no values; call model.to_empty")
    message = "(?s)device mismatch.*Move inputs, parameters, and buffers to the same device|two different devices cpu, meta"
    theirs = (RuntimeError, message)  # PyTorch's own; the second is 2.11's
    error, message = found if place == "input" else theirs
    with pytest.raises(error, match=message), torch.set_grad_enabled(grad):
        wrapped(model)(*batch)
    assert {(type(p), p.device.type) for p in model.parameters()} == {(nn.Parameter, "meta")}
    model.to_empty(device="cpu").load_state_dict(Mlp().state_dict())
    plain_step(wrapped(model), adamw(model.parameters()), vectors(0))
    assert {type(p) for p in model.parameters()} == {ShardedParameter}


def test_parameters_that_inductor_freezes_are_refused_by_the_setting() -> None:
    model = Mlp()
    compiled = wrapped(model)
    with torch._inductor.config.patch(freezing=True):
        plain_step(compiled, adamw(model.parameters()), vectors(0))
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"torch\._inductor\.config\.freezing = False"):
            compiled(*vectors(1))
    with torch.no_grad():
        assert compiled(*vectors(1)).isfinite()


def test_one_parameter_on_another_device_is_refused_by_name() -> None:
    class Elsewhere(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.elsewhere = nn.Parameter(torch.ones(3, device="meta"))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return super().forward(x, y), self.elsewhere * 2

    model = Elsewhere()
    with pytest.raises(UnsupportedModelError, match=r"parameter elsewhere.* on the meta device"):
        wrapped(model)(*vectors(0))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_sparse_parameter_is_left_to_eager_by_dynamo_and_refused_with_fullgraph() -> None:
    class Sparse(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.eye(IN).to_sparse(), requires_grad=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.sparse.mm(self.mixing, x.t()).t(), y)

    eager, ours = Sparse(), Sparse()
    eager.load_state_dict(ours.state_dict())
    with pytest.raises(RuntimeError, match="does not support sparse Tensors"):
        torch.compile(ours, backend=BACKEND, fullgraph=True)(*vectors(0))
    assert {type(p) for p in ours.parameters()} == {nn.Parameter}
    sides = [(eager, adamw(eager.parameters())), (wrapped(ours), adamw(ours.parameters()))]
    losses = [[plain_step(model, optimizer, vectors(n)).item() for n in range(2)] for model, optimizer in sides]
    assert losses[0] == losses[1]
    assert [name for name, p in ours.named_parameters() if not isinstance(p, ShardedParameter)] == ["mixing"]


def test_parameters_not_initialised_yet() -> None:
    model = Mlp()
    model.first.weight = nn.UninitializedParameter()
    with pytest.raises(ValueError, match="uninitialized parameter"):
        wrapped(model)(*vectors(0))
    assert [type(p) for p in model.parameters()][1:] == [nn.Parameter] * 5


def test_a_lazy_layer_is_initialised_by_the_first_call() -> None:
    model = Mlp()
    model.first = nn.LazyLinear(13)
    compiled = wrapped(model)
    compiled(*vectors(0)).backward()
    assert {type(p) for p in model.parameters()} == {ShardedParameter}
    eager = Mlp()
    eager.load_state_dict(model.state_dict())
    assert torch.equal(compiled(*vectors(1)), eager(*vectors(1)))


def clamp_data(model: Mutating) -> None:
    model.first.weight.data.clamp_(-0.1, 0.1)


def clamp(model: Mutating) -> None:
    with torch.no_grad():
        model.first.weight.clamp_(-0.1, 0.1)


def clamp_a_view(model: Mutating) -> None:
    with torch.no_grad():
        model.first.weight[1:3].clamp_(-0.1, 0.1)


def moving_average(model: Mutating) -> None:
    with torch.no_grad():
        model.average.lerp_(model.first.weight, 0.1)


def assign_data(model: Mutating) -> None:
    model.first.weight.data = model.first.weight.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("change", [clamp_data, clamp, clamp_a_view, moving_average, assign_data], ids=lambda f: f.__name__)
def test_a_parameter_changed_in_forward_is_refused_with_the_users_line(change: Callable[[Mutating], None], grad: bool) -> None:
    name = "average" if change is moving_average else "first.weight"
    first = change.__code__.co_firstlineno
    lines = "|".join(map(str, range(first, first + 4)))
    message = rf"(?s)changes parameter {name} .* between steps, inside .*gathered\(model, write=True\).*{HERE}\", line ({lines})"
    with torch.set_grad_enabled(grad):
        model = Mutating(change)
        twin = copy.deepcopy(model)
        with pytest.raises(UnsupportedModelError, match=message + rf", in {change.__name__}\n.*model\."):
            wrapped(model)(*vectors(0))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_same_models(twin, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, r"(?s)changes parameter embedding.weight .*Embedding\(max_norm=.*test_bad_input.py.*self.embedding"),
        (
            {"sparse": True},
            r"(?s)gradient of parameter embedding.weight is sparse .*sparse=False.*test_bad_input.py.*self.embedding",
        ),
    ],
    ids=["max_norm", "sparse"],
)
def test_embeddings_that_cannot_be_partitioned(options: dict[str, Any], message: str) -> None:
    model = Words(**options)
    twin = copy.deepcopy(model)
    with pytest.raises(UnsupportedModelError, match=message):
        wrapped(model)(torch.tensor([[3, 5, 3]]))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_same_models(twin, model)


class Failing(GraphCompiler):
    """Fails in one stage of compiling a graph."""

    def __init__(self, stage: str) -> None:
        super().__init__(Config())
        self.stage = stage

    def run_joint_passes(self, joint: fx.GraphModule) -> None:
        self._fail("joint")
        super().run_joint_passes(joint)

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        self._fail(kind)
        return super().schedule(graph, kind)

    def finish(self, program: Program, context: Any) -> Callable[..., Any]:
        self._fail("finish")
        return super().finish(program, context)

    def _fail(self, stage: str) -> None:
        if stage == self.stage:
            raise ArithmeticError(f"the {stage} stage is broken")


def failing(stage: str) -> Callable[..., Any]:
    return lambda gm, inputs: Failing(stage).compile(gm, inputs)


@pytest.mark.parametrize("stage", ["joint", "forward", "backward", "finish"])
def test_a_failing_pass_leaves_the_model_as_it_was(stage: str) -> None:
    assert_refused(Mlp(), vectors(0), f"the {stage} stage is broken", RuntimeError, backend=failing(stage))


class TraceOnly(Mlp):
    """Does something while it is traced that it doesn't do in eager."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return self.act(loss) if torch.compiler.is_compiling() else loss


def stumble(loss: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("a mistake of the user's")


def give_up(loss: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return loss


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (torch.ops.zinf_test.opaque, "(?s)fake tensors.*zinf_test.opaque"),
        (stumble, "a mistake of the user's"),
        (give_up, "(?s)graph_break.*test_bad_input.py"),
        (lambda loss: loss.expand(2, 3) @ loss.expand(2, 3), "(?s)same reduction dim.*test_bad_input.py"),
    ],
    ids=["no fake kernel", "users error", "unsupported construct", "shapes"],
)
def test_an_error_while_tracing_leaves_the_model_as_it_was(act: Any, message: str) -> None:
    assert_refused(TraceOnly(act), vectors(0), message, Exception, fullgraph=True)


@pytest.mark.parametrize("op", [torch.ops.zinf_test.opaque], ids=["no fake kernel"])
def test_what_dynamo_leaves_to_eager_between_graphs_reads_no_hollow_parameter(op: Any) -> None:
    class Between(Mlp):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = op(self.norm(self.first(x)).detach())
            return loss_of((self.second(hidden) - y).square().mean())

    eager, model = twins(Between)
    for side in (eager, wrapped(model)):
        plain_step(side, adamw(side.parameters()), vectors(0))
    assert_same_models(eager, model)


def test_a_model_without_parameters() -> None:
    x = torch.randn(5, requires_grad=True)
    torch.compile(nn.GELU(), backend=BACKEND)(x).sum().backward()
    eager = x.detach().requires_grad_()
    nn.GELU()(eager).sum().backward()
    assert_same("gradient", eager.grad, x.grad)


def test_a_model_whose_parameters_are_all_frozen() -> None:
    eager, model = twins(lambda: Mlp().requires_grad_(False))
    x, y = vectors(0)
    grads = [torch.autograd.grad(side(x.requires_grad_(), y), x)[0] for side in (eager, wrapped(model))]
    assert torch.equal(*grads)
    assert {(type(p), p.grad) for p in model.parameters()} == {(ShardedParameter, None)}


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS = pytest.mark.parametrize(
    ("wrap", "name"),
    [(DistributedDataParallel, "DistributedDataParallel"), (fsdp1, "FullyShardedDataParallel"), (fully_shard, "FSDPModule")],
    ids=["ddp", "fsdp1", "fsdp2"],
)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:The `NO_SHARD`")
@WRAPPERS
@pytest.mark.parametrize("order", ["compiled last", "compiled first", "function"])
def test_a_data_parallel_wrapper_is_refused(wrap: Callable[..., Any], name: str, order: str) -> None:
    model: Any = Mlp()
    if order == "compiled first":
        model.compile(backend=BACKEND)
    model = wrap(model)
    run: Any = model
    if order == "compiled last":
        run = torch.compile(model, backend=BACKEND)
    if order == "function":
        run = torch.compile(lambda *batch: 2 * model(*batch), backend=BACKEND)
    with pytest.raises(UnsupportedModelError, match=f"wrapped in {name}; .*compile the bare model without DDP, FSDP"):
        run(*vectors(0))
    assert not any(isinstance(p, ShardedParameter) for p in model.parameters())


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard], ids=["ddp", "fsdp2"])
def test_a_wrapper_around_a_partitioned_model_is_refused_at_its_call(wrap: Callable[..., Any]) -> None:
    model = Mlp()
    model.compile(backend=BACKEND)
    model(*vectors(0))
    wrapper = wrap(model)
    with pytest.raises(UnsupportedModelError, match=r"wrapped in .*compile the bare model"):
        wrapper(*vectors(0))


def test_gathered_takes_a_plain_model() -> None:
    model = Mlp()
    with zinf_compile.gathered(model, write=True) as same:
        assert same is model
