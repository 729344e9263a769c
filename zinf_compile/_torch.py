"""Private names of PyTorch. No other file of the package imports any, but for `_inductor.py`.

Checked on 2.11.0, 2.13.0 and 2.15.0; each line says why a public name doesn't serve.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd as aot_autograd  # documented, in a private module
from torch._dynamo.convert_frame import compile_lock as compile_lock  # held while Dynamo compiles: see deferred_step.py
from torch._dynamo.decorators import graph_break as graph_break  # documented, in a private module
from torch._dynamo.eval_frame import skip_code  # torch.compiler.disable also bars a function from being inlined
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback  # Dynamo wraps all other errors of a backend
from torch._dynamo.symbolic_convert import InstructionTranslator  # which backend Dynamo captures for
from torch._functorch import config as functorch_config  # two switches that aren't public
from torch._functorch._aot_autograd import descriptors  # identity of graph inputs and outputs, without parsing names
from torch._guards import CompileContext, TracingContext  # what is compiled; AOTAutograd's metadata
from torch._subclasses.fake_tensor import (  # weightless tracing for the dump
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import distributed_c10d  # the number of process groups has no public name
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend: ranks for the dump
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented, in a private module
from torch.utils._python_dispatch import _disable_current_modes  # real tensors, while AOTAutograd traces
from torch.utils._pytree import tree_leaves as tree_leaves  # the public one is slower
from torch.utils._pytree import tree_map as tree_map

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which a subclass's `__torch_function__` isn't called; documented for subclass authors, private by name."""

tensor_on_storage = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]  # public ways enlarge the storage
no_override = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class that has none; documented for subclass authors, private by name."""

rebuild_tensor = torch._utils._rebuild_tensor_v2
"""The function that pickled tensors refer to: any PyTorch loads such files, also with `weights_only=True`."""

without_python_dispatcher = torch._C._DisablePythonDispatcher
"""Context in which calling an operator releases the GIL, as it does outside of tracing; the class has no public name."""

DATA_ASSIGNMENTS = frozenset([torch.Tensor.set_, getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)])
"""Operators as which Dynamo captures `parameter.data = value`: from 2.15 on one of its own."""

LazyGraphModule = _LazyGraphModule  # its code is generated where it is read or first run
BoxedCodeGen = torch.fx.graph._BoxedCodeGen
"""Code that takes its inputs in a list and empties it, so that they are freed after their last use."""


def is_boxed(graph: torch.fx.Graph) -> bool:
    """Return whether a graph's code is `BoxedCodeGen`'s: there is no other way to ask."""
    return isinstance(graph._codegen, BoxedCodeGen)


def dynamo_is_verbose() -> bool:
    """Return whether the user asked for the frames of errors that are raised while Dynamo compiles."""
    return bool(torch._dynamo.config.verbose)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """Return the storage in the class that pickled tensors refer to, without its warning of deprecation."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Close a process group that this process made, unless `destroy_process_group` closed it before."""
    if dist.is_initialized() and group in distributed_c10d._world.pg_map:
        _note_names()
        dist.destroy_process_group(group)


def store_of(group: dist.ProcessGroup) -> torch._C._distributed_c10d.Store | None:
    """Return the key-value store through which a process group was made; None once it is destroyed."""
    made = distributed_c10d._world.pg_map.get(group)
    return None if made is None else made[1]


def never_compile_alone(function: Callable[..., Any]) -> None:
    """Let Dynamo inline a function into what it captures, but not capture a call that runs between two graphs."""
    skip_code(function.__code__)


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensor objects (data, device, type), each keeping its identity, class and attributes.

    The public `torch.utils.swap_tensors` refuses objects that have weak references, as the parameters of nn.LSTM have.
    """
    torch._C._swap_tensor_impl(one, other)


def become(one: torch.Tensor, other: torch.Tensor) -> None:
    """Give the object `one` the data, class and attributes of `other`, which is invalid afterwards."""
    swap_contents(one, other)
    one.__class__ = type(other)
    vars(one).update(vars(other))


def storage_owners(tensor: torch.Tensor) -> int:
    """Return the reference count of a tensor's storage: the tensors that share it, plus one for the Python object made here."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def tensor_owners(tensor: torch.Tensor) -> int:
    """Return the reference count of the tensor itself in C++: its Python object, views of it, and what autograd saved."""
    return int(tensor._use_count())  # type: ignore[attr-defined]  # which torch.utils.swap_tensors asks for


def hooks_may_keep_tensors() -> bool:
    """Say whether hooks for saved tensors are set that may keep the tensors they are given: not those of `checkpoint`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) != torch.utils.checkpoint.__name__


def aot_index(node: torch.fx.Node) -> int | None:
    """Return the index of the captured graph's input that an AOT placeholder stands for."""
    description = node.meta.get("desc")
    return description.idx if isinstance(description, descriptors.PlainAOTInput) else None


def gradient_outputs(output: torch.fx.Node) -> dict[int, int]:
    """Return {position among the outputs: index of the captured graph's input whose gradient it is}."""
    return {
        position: description.grad_of.idx
        for position, description in enumerate(output.meta.get("desc") or ())
        if isinstance(description, descriptors.GradAOTOutput) and isinstance(description.grad_of, descriptors.PlainAOTInput)
    }


def mutated_inputs(output: torch.fx.Node) -> dict[int, int]:
    """Return {position among the outputs: index of the captured graph's input that is overwritten with it}."""
    return {
        position: each.mutated_input.idx
        for position, each in enumerate(output.meta.get("desc") or ())
        if isinstance(each, descriptors.InputMutationAOTOutput) and isinstance(each.mutated_input, descriptors.PlainAOTInput)
    }


def describe_saved(output: torch.fx.Node, own: int) -> None:
    """Describe all outputs of a forward behind the user's `own` as saved, where outputs are described."""
    if known := output.meta.get("desc"):
        count = len(output.args[0]) - own  # type: ignore[arg-type]
        output.meta["desc"] = [*known[:own], *map(descriptors.SavedForBackwardsAOTOutput, range(count))]


def captured_name(placeholder: torch.fx.Node) -> str:
    """Return the user's name for an input of a Dynamo graph, `h.0.attn.weight`, or for an argument, `x`."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    text = name() if callable(name := getattr(source, "name", None)) else name
    return prettified(str(text)) if text else str(placeholder.target)


def prettified(name: str) -> str:
    """Return Dynamo's name `L['self'].h.0.attn.weight` as users write it: `h.0.attn.weight`."""
    for kind in ("_modules", "_parameters", "_buffers"):
        name = name.replace(f".__dict__['{kind}']['", ".").replace(f".{kind}['", ".").replace(f"{kind}['", "")
    name = name.replace("']", "")
    head, _, rest = name.partition(".")
    return (rest or head[3:]) if head.startswith(("L['", "G['")) else name


def limited_frame() -> str | None:
    """Return the function on the stack that Dynamo runs eagerly because of `recompile_limit`, None if there is none."""
    entries_of = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    limit = torch._dynamo.config.recompile_limit
    frame = sys._getframe(1)
    while frame is not None:
        entries: Sequence[Any] = entries_of(frame.f_code) or ()
        if len(entries) >= limit:
            code = frame.f_code
            return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def packs_for_recomputation() -> bool:
    """Return whether torch.utils.checkpoint is packing the tensors that its recomputed forward saves."""
    frame = sys._getframe(2)
    return frame is not None and any(
        f is not None and f.f_code.co_name == "pack_hook" and f.f_code.co_filename == checkpoint.__file__
        for f in (frame, frame.f_back, frame.f_back and frame.f_back.f_back)
    )


def keeps_autograd_graph() -> bool:
    """Return whether the running backward may run again (`retain_graph=True`); True outside of one. It has no public name."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def runs_backward() -> bool:
    """Return whether this thread runs a backward. It has no public name."""
    return bool(torch._C._current_graph_task_id() != -1)


LEAVES_RECURRENT_FORWARDS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether Dynamo compiles nothing of a forward that calls an RNN; later versions compile what comes before and after the call."""


def inside_ddp() -> bool:
    """Return whether a DistributedDataParallel module's forward is running."""
    return DistributedDataParallel._get_active_ddp_module() is not None


@torch.compiler.assume_constant_result
def by_backend_of_pytorch() -> bool:
    """Return, while Dynamo captures code that calls it, whether that is for a backend of PyTorch's own, such as Inductor."""
    backend = _innermost(InstructionTranslator.current_tx().output.compiler_fn)
    backend = getattr(backend, "compiler_fn", backend)
    while isinstance(backend, functools.partial):
        backend = backend.func
    return re.match(r"torch(\._dynamo\.(backends|eval_frame)|\._inductor|$)", getattr(backend, "__module__", "")) is not None


@torch.compiler.assume_constant_result
def inside_dynamo() -> bool:
    """Return whether Dynamo compiles in this thread. In code that isn't captured PyTorch 2.11's `is_compiling` is false then."""
    return CompileContext.current_compile_id() is not None


def compile_numbers() -> tuple[int, int] | None:
    """Return the number of the function that Dynamo compiles, and how often it was compiled before; None: it compiles none."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_id is None or compile_id.frame_compile_id is None:
        return None
    return compile_id.frame_id, compile_id.frame_compile_id


def inside_transform() -> bool:
    """Return whether a transform of `torch.func` runs, such as `grad` or `vmap`."""
    return bool(torch._C._are_functorch_transforms_active())


def outside_tracing() -> contextlib.AbstractContextManager[Any]:
    """Context in which tensors are real while a graph is traced."""
    return _disable_current_modes()


_names: list[Any] = [None, 0]
"""The default process group, and the most groups that there were at a time since it was made."""


def _note_names() -> int:
    """Note how many process groups there are; return the most that there were."""
    whole = dist.group.WORLD
    most = _names[1] if _names[0] is not None and _names[0]() is whole else 0
    _names[:] = [weakref.ref(whole), max(most, len(distributed_c10d._world.pg_names))]
    return int(_names[1])


def level_group_names(group: torch.distributed.ProcessGroup) -> None:
    """Make the number of process groups equal on all members of a group, by adding groups of one rank.

    `new_group(use_local_synchronization=True)` names a group by that number: members with different numbers would never
    rendezvous, and a number that was before `destroy_group` finds the addresses of the group that had it. There is no public way
    to name a group.
    """
    counts: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(counts, _note_names(), group=group)
    for _ in range(max(counts) - len(distributed_c10d._world.pg_names)):
        torch.distributed.new_group([torch.distributed.get_rank()], backend="gloo", use_local_synchronization=True)


@contextlib.contextmanager
def aot_settings(*, backward_ahead: bool) -> Iterator[None]:
    """Context for compiling: the backward may run twice (`retain_graph=True`), as it may in eager PyTorch.

    With `backward_ahead` it is compiled with its forward rather than when it first runs.
    """
    with functorch_config.patch(donated_buffer=False, force_non_lazy_backward_lowering=backward_ahead):
        yield
    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    if metadata is not None:
        metadata.bw_donated_idxs = []  # with the option off it stays None, which the backward reads as "some"


def activation_budget() -> float:
    """Return the part of the activations that PyTorch's partitioner is told to save at most; 1.0 by default."""
    return float(functorch_config.activation_memory_budget)


def is_buffer(placeholder: torch.fx.Node) -> bool:
    """Return whether an input of a Dynamo graph is a buffer of a module."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return "_buffers['" in str(name() if callable(name) else name)


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Context in which this process is rank 0 of `world_size` ranks that don't exist."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_mode() -> Any:
    """Context in which tensors have metadata and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operators that a fake mode can't run; each has the operator, `func`."""


@contextlib.contextmanager
def convertible_parameters(mode: Any) -> Iterator[None]:
    """Context in which modules made under a fake mode can be cast (`bfloat16()`, `to(dtype)`), as they can outside.

    A cast swaps each fake parameter, which PyTorch refuses where weak references to one exist; the mode's memory of what it has
    converted is made of these. Inside, it refers to it as usual.
    """
    converter = mode.fake_tensor_converter.meta_converter
    kept, converter.tensor_memo = converter.tensor_memo, {}
    try:
        yield
    finally:
        converter.tensor_memo = kept


PARAMETER_TYPES = (torch.nn.Parameter, FakeTensor)
"""Exact types of whole parameters. Dumps trace fake ones, which are never partitioned."""


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether `torch.compile` was called on the model or on a module of it, in place or not.

    There is no public way: `Module.compile` sets a compiled `_call_impl`, `torch.compile(module)` wraps with `_orig_mod`.
    """
    return any(m._compiled_call_impl is not None or "_orig_mod" in (*m._modules, *vars(m)) for m in model.modules())


def backends_of(model: torch.nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of the backend of each `torch.compile` of the model or of a module of it, in place or not.

    Before the first call they are nowhere else: in the callback of the context that enters Dynamo. A callback is wrapped several
    times; the innermost calls the backend with its arguments.
    """
    return [backend for module in model.modules() for backend in own_backends(module)]


def own_backends(module: torch.nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Return the same for one module alone, without those that it contains."""
    wrapped = [getattr(vars(module).get("dynamo_ctx"), "callback", None)]
    config = getattr(module._compiled_call_impl, "get_compiler_config", None)
    wrapped += [getattr(cell.cell_contents, "callback", None) for cell in getattr(config, "__closure__", None) or ()]
    backends = [backend for backend in map(_innermost, wrapped) if isinstance(backend, torch._TorchCompileWrapper)]
    return [(backend.compiler_name, dict(backend.kwargs)) for backend in backends]


def _innermost(callback: Any) -> Any:
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback
