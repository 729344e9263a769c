"""Compiles regions through Inductor: each distinct structure once, several in parallel.

Called by `graph_compiler`, which lowers each region to a call of `SharedRegion`; knows no transfers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from zinf_compile._inductor import (
    caches_compiled_regions,
    code_settings,
    compile_with_inductor,
    inductor_decompositions,
    inductor_processes,
    remove_damaged_library,
    unwritable_inductor_cache,
    vector_isa_probes,
)
from zinf_compile.errors import CompilationError
from zinf_compile.ir.compute_ops import addmm_out, copy_out, embedding_gradient, mm_out
from zinf_compile.passes.graph.alias import is_view
from zinf_compile.passes.graph.region_structure import structure
from zinf_compile.passes.graph.token_loop import TokenLoop, is_token_loop
from zinf_compile.passes.lower import run_by_operator
from zinf_compile.runtime.system.process_wide import process_wide

from .fork_pool import run_forked

Compiled = Callable[[list[Any]], Sequence[Any]]

aten = torch.ops.aten

_LIBRARY_CALLS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.addmm_.default, aten.bmm.default, aten.baddbmm.default, aten.baddbmm_.default}
    | {mm_out, addmm_out, copy_out, aten.empty_strided.default}
)
"""Operators for which Inductor calls the same library as eager PyTorch, unless it autotunes."""


class SharedRegion:
    """One compiled callable for all regions of one structure. Callable after `resolve`."""

    __slots__ = ("_fn", "backward", "graph", "mode", "threads")

    def __init__(self, graph: fx.GraphModule, *, backward: bool, mode: str = "default") -> None:
        self.graph: fx.GraphModule | None = graph
        self.backward = backward
        self.mode = mode
        self.threads = torch.get_num_threads()
        self._fn: Compiled | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on `args`, which is emptied."""
        assert self._fn is not None, "a region is compiled before its graph runs"
        return self._fn(args)

    def compile(self, *, alone: bool = False) -> Compiled:
        """Compile the graph through Inductor; `alone`: in a forked worker."""
        assert self.graph is not None
        self.graph.graph.set_codegen(CodeGen())  # Inductor is given code that takes values one by one
        self.graph.recompile()
        compiled: Compiled = compile_with_inductor(
            self.graph,
            backward=self.backward,
            threads=self.threads,
            symbolic=any(_is_symbolic(node.meta.get("val")) for node in self.graph.graph.nodes),
            mode=self.mode,
            alone=alone,
        )
        return compiled

    def resolve(self, fn: Compiled) -> None:
        """Set the compiled code; drop the graph."""
        self._fn, self.graph = fn, None


_shared: dict[tuple[Any, ...], SharedRegion] = process_wide({})
_lock = threading.Lock()
_warned: set[str] = process_wide(set())
_compiling_s = 0.0


class InductorRegions:
    """The regions of one captured graph, forward and backward. Equal regions, also of other graphs, are compiled once.

    Regions with symbolic sizes or attributes are shared within their graph only, to which these belong.
    """

    def __init__(self, *, mode: str = "default", on_refusal: str = "fx") -> None:
        self._mode = mode
        self._settings = functools.cache(code_settings)  # Inductor is imported for those who compile
        self._on_refusal = on_refusal
        self._own: dict[tuple[Any, ...], SharedRegion] = {}
        self._waiting: dict[SharedRegion, tuple[Any, ...]] = {}

    def collect(self, region: fx.GraphModule, *, backward: bool) -> Compiled:
        """Add a region; return its callable, valid after `compile`."""
        loops = [node.target for node in region.graph.nodes if is_token_loop(node)]
        if loops:
            return self._loop(loops[0], region, backward=backward)
        if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in region.graph.nodes if node.op != "output"):
            return run_by_operator(region)
        if self._mode == "default" and all(map(_is_library_call, region.graph.nodes)):
            return run_by_operator(region)
        key = (backward, self._mode, torch.get_num_threads(), self._settings(), *structure(region))
        known = self._own if _belongs_to_its_graph(region) else _shared
        with _lock:
            shared = known.setdefault(key, SharedRegion(region, backward=backward, mode=self._mode))
        if shared.graph is not None:
            self._waiting[shared] = key
        return shared

    def _loop(self, loop: TokenLoop, region: fx.GraphModule, *, backward: bool) -> Compiled:
        """Add the slices of a loop; return the loop over them. A slice of any number of tokens runs operator by operator."""
        add = functools.partial(self.collect, backward=backward)
        bodies = {rows: add(body) if rows else run_by_operator(body) for rows, body in loop.bodies.items()}
        given, *_ = (list(node.args) for node in region.graph.nodes if is_token_loop(node))
        inputs = region.graph.find_nodes(op="placeholder")
        order = [inputs.index(node) for node in given]
        items: list[Any] = [node.args[1] for node in region.graph.output_node().args[0]]  # type: ignore[union-attr]

        def run(args: list[Any]) -> Sequence[Any]:
            values = [args[place] for place in order]
            args.clear()
            results = loop.run(bodies, values)
            return tuple(results[item] for item in items)

        return run

    def compile(self, *, rank: int, ranks: int) -> None:
        """Compile the collected regions. Ranks of a node start at different ones, so that they share the work by their cache."""
        waiting = [shared for shared in self._waiting if shared.graph is not None]
        problem = unwritable_inductor_cache() if waiting else ""
        if problem:
            for shared in waiting:
                shared.resolve(self._without_inductor(shared, problem))
        elif waiting:
            on_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            first = int(os.environ.get("LOCAL_RANK", rank)) % on_node * len(waiting) // on_node
            waiting = waiting[first:] + waiting[:first]
            devices = _devices(waiting)
            if "cpu" in devices:
                concurrent.futures.wait(_probe_vector_isa())
            with _timed():
                for number in _in_order_of_readiness(waiting, devices, processes=inductor_processes() // on_node):
                    waiting[number].resolve(self._compile(waiting[number]))
        self._waiting.clear()

    def _compile(self, shared: SharedRegion) -> Compiled:
        try:
            try:
                return shared.compile()
            except Exception as error:
                if not remove_damaged_library(error):
                    raise
                return shared.compile()
        except Exception as error:
            return self._without_inductor(shared, describe_refusal(error), error)

    def _without_inductor(self, shared: SharedRegion, reason: str, error: Exception | None = None) -> Compiled:
        """Warn and return the region as a callable without Inductor; later graphs try Inductor again."""
        assert shared.graph is not None
        with _lock:
            _shared.pop(self._waiting[shared], None)
        if self._on_refusal == "error":
            raise CompilationError(
                f"Inductor can't compile a region of the model ({reason}). With on_refusal='fx' it runs operator by operator, "
                "with compute='fx' the whole model does" + (f". Inductor said:\n{error}" if error else "")
            ) from error
        if reason not in _warned:
            _warned.add(reason)
            warnings.warn(
                f"Inductor can't compile a region of the model ({reason}); it runs operator by operator. Option "
                "on_refusal='error' makes this an error, with Inductor's whole message",
                stacklevel=2,
            )
        return run_by_operator(shared.graph)


def decompositions() -> dict[Any, Any]:
    """Return the decompositions that Inductor expects."""
    return {**inductor_decompositions(), torch.ops.aten.embedding_dense_backward.default: embedding_gradient}


def prepare(device: torch.device) -> None:
    """Start the preparations for compiling for a device in the background, before the first region is known."""
    if device.type == "cpu":
        _probe_vector_isa()


def seconds_compiling() -> float:
    """Return the wall seconds that this process has spent compiling regions."""
    return _compiling_s


def describe_refusal(error: Exception) -> str:
    """Return the first line of Inductor's error, with the operator if it names one."""
    lines = str(error).splitlines() or [""]
    operator = next((line.split()[1] for line in lines if line.lstrip().startswith("target: ")), "")
    reason = f"{type(error).__name__}: {lines[0]}"
    return f"operator {operator}, {reason}" if operator else reason


def _is_library_call(node: fx.Node) -> bool:
    """Return whether a node needs no compilation. Regions of such nodes alone, such as a tile's product, run faster without."""
    return node.op in ("placeholder", "output") or node.target in _LIBRARY_CALLS or is_view(node)


def _belongs_to_its_graph(region: fx.GraphModule) -> bool:
    return any(node.op == "get_attr" or _is_symbolic(node.meta.get("val")) for node in region.graph.nodes)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    if isinstance(value, (list, tuple)):
        return any(_is_symbolic(item) for item in value)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _in_order_of_readiness(waiting: Sequence[SharedRegion], devices: set[str], *, processes: int) -> Iterator[int]:
    """Yield the regions' numbers as forked workers put their compiled code into the cache."""
    autotunes = waiting[0].mode != "default"  # autotuning measures time, so nothing else may run
    if processes < 2 or len(waiting) < 2 or devices != {"cpu"} or autotunes or not caches_compiled_regions():
        return iter(range(len(waiting)))
    return run_forked([functools.partial(shared.compile, alone=True) for shared in waiting], processes=processes)


def _devices(waiting: Sequence[SharedRegion]) -> set[str]:
    """Return the types of the devices that regions compute on."""
    nodes = (node for shared in waiting if shared.graph is not None for node in shared.graph.graph.nodes)
    return {value.device.type for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}


@functools.cache
def _probe_vector_isa() -> tuple[Future[bool], ...]:
    """Start Inductor's probes of vector instructions, each of which builds and loads a library: ten seconds in all."""
    probes = vector_isa_probes()
    threads = ThreadPoolExecutor(max(1, len(probes)), thread_name_prefix="zinf-probe")
    futures = tuple(threads.submit(probe) for probe in probes)
    threads.shutdown(wait=False)
    return futures


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    global _compiling_s  # noqa: PLW0603
    start = time.perf_counter()
    try:
        yield
    finally:
        _compiling_s += time.perf_counter() - start
