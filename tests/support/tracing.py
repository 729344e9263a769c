"""Graphs of small modules as the passes get them: through AOTAutograd alone, or through torch.compile.

`traced` runs a module once on fake tensors, notes each function that it calls, and gives that to the product in the place of
Dynamo's capture: no bytecode is read and nothing runs. `compiled` is the same by torch.compile, where a graph has what Dynamo
alone makes (higher-order operators, checkpoints, dynamic shapes). tests/e2e/test_pipeline.py compares the two.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from irtext import copied
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils import _pytree as pytree

from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.ir.program import Program


class Recorder(GraphCompiler):
    """Keeps the joint graph before its passes, and each other graph before the schedule is inserted.

    Keys: joint, forward, backward, inference.
    """

    def __init__(self, found: dict[str, fx.GraphModule], config: Config | None = None) -> None:
        super().__init__(config or Config(compute="fx"))
        self._found = found

    def run_joint_passes(self, joint: fx.GraphModule) -> None:
        self._found["joint"] = copied(joint)
        super().run_joint_passes(joint)

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        self._found[kind] = copied(graph)
        return super().schedule(graph, kind)


class Tracer(Recorder):
    """Schedules nothing and runs nothing: parameters stay whole."""

    def schedule(self, graph: fx.GraphModule, kind: str) -> Any:
        self._found[kind] = copied(graph)

    def finish(self, program: Any, context: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            raise AssertionError("a graph that was only traced is run")

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


class _FoundError(Exception):
    """The joint graph is made: what AOTAutograd does from there on is of no use."""


class _JointTracer(Tracer):
    def run_joint_passes(self, joint: fx.GraphModule) -> None:
        self._found["joint"] = copied(joint)
        raise _FoundError


_SWITCHES = (torch.amp._enter_autocast, torch._C._set_grad_enabled)


def traced(module: nn.Module, *inputs: Any) -> dict[str, fx.GraphModule]:
    """Return the module's graphs for training and for inference, by AOTAutograd, as `Recorder` names them."""
    found: dict[str, fx.GraphModule] = {}
    Tracer(found).compile(*captured(module, *inputs))
    with torch.no_grad():
        Tracer(found).compile(*captured(module, *inputs))
    return found


def joint_graph(module: nn.Module, *inputs: Any) -> fx.GraphModule:
    """Return the graph that `traced` names joint, in half the time: it isn't cut into forward and backward."""
    found: dict[str, fx.GraphModule] = {}
    with contextlib.suppress(_FoundError):
        _JointTracer(found).compile(*captured(module, *inputs))
    return found["joint"]


def compiled(module: nn.Module, *inputs: Any, dynamic: bool | None = None) -> dict[str, fx.GraphModule]:
    """Return the same by torch.compile, and train a step."""
    found: dict[str, fx.GraphModule] = {}

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        return Recorder(found).compile(gm, examples)

    model = torch.compile(module, backend=backend, dynamic=dynamic)
    output = model(*inputs)
    outputs = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad and t.grad_fn]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    with torch.no_grad():
        model(*inputs)
    return found


def captured(module: nn.Module, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return the graph of torch functions that the module calls, and its inputs in the order of their first use."""
    mode, fake = _Calls(module, inputs), FakeTensorMode(allow_non_fake_inputs=True)
    states = {name: mode.stand_in(name, value, fake) for name, value in _states(module).items()}
    names = inspect.signature(module.forward).parameters
    arguments = [mode.stand_in(name, value, fake) for name, value in zip(names, inputs, strict=True)]
    attribute = nn.Module.__getattr__

    def read(self: nn.Module, name: str) -> Any:
        value = attribute(self, name)
        mode.node_of(value)  # what a module reads of itself is an input from there on
        return value

    with fake, mock.patch.object(nn.Module, "__getattr__", read), mode:
        output = torch.func.functional_call(module, states, tuple(arguments))
    return mode.finish(output if isinstance(output, tuple) else (output,))


def _states(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


class _Calls(PreDispatchTorchFunctionMode):  # which autocast reports to
    """Writes each function that is called with tensors into a graph."""

    def __init__(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        super().__init__(tracer=None)
        self.graph = fx.Graph()
        self._inputs: dict[int, tuple[str, torch.Tensor]] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._values: dict[fx.Node, torch.Tensor] = {}
        self._last: fx.Node = self.graph._root
        self._kept: list[Any] = []
        self._autocasts: list[fx.Node] = []
        self._buffers = {name for name, _ in module.named_buffers()}

    def stand_in(self, name: str, value: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        """Return a fake tensor for an input of the graph."""
        made = fake.from_tensor(value)
        self._inputs[id(made)] = (name, value)
        self._kept.append(made)
        return made

    def node_of(self, value: Any) -> Any:
        """Return what stands for `value` in the graph."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._nodes and id(value) in self._inputs:
            name, real = self._inputs[id(value)]
            with self.graph.inserting_after(self._last):
                node = self._last = self.graph.placeholder(name.replace(".", "_"))
            *path, last = name.split(".")
            kind = "_buffers" if name in self._buffers else "_parameters" if isinstance(real, nn.Parameter) else ""
            modules = "".join(f"._modules['{part}']" for part in path)
            source = f"L['self']{modules}.{kind}['{last}']" if kind else f"L['{name}']"
            node.meta["grapharg"] = types.SimpleNamespace(source=types.SimpleNamespace(name=source))
            node.meta["example_value"] = value
            self._nodes[id(value)] = node
            self._values[node] = real
        return self._nodes[id(value)]

    def finish(self, outputs: tuple[Any, ...]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """Return the graph and its inputs; what isn't used is none, and an input that is returned is no output."""
        nodes = pytree.tree_map(self.node_of, outputs)
        self.graph.output(tuple(node for node in nodes if isinstance(node, fx.Node) and node.op != "placeholder"))
        for node in [node for node in self._values if not node.users]:
            self.graph.erase_node(node)
        values = [self._values[node] for node in self.graph.find_nodes(op="placeholder")]
        return fx.GraphModule(nn.Module(), self.graph), values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.amp._exit_autocast:
            self.graph.call_function(func, (self._autocasts.pop(),))
            return None
        result = func(*args, **(kwargs or {})) if func is not torch.amp._enter_autocast else None
        if func in _SWITCHES or _tensors(result):
            node = self.graph.call_function(func, *pytree.tree_map(self.node_of, (args, kwargs or {})))
            node.meta["example_value"] = result
            frames = [f for f in traceback.extract_stack(limit=20)[:-1] if "torch" not in Path(f.filename).parts]
            node.stack_trace = "".join(traceback.format_list(frames))
            if func is torch.amp._enter_autocast:
                self._autocasts.append(node)
            self._note(node, result)
        return result

    def _note(self, node: fx.Node, value: Any) -> None:
        self._kept.append(value)  # ids are of living values
        self._nodes[id(value)] = node
        if isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                part = self.graph.call_function(_item, (node, index))
                part.meta["example_value"] = item
                self._note(part, item)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
