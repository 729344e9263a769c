"""Private names of Inductor: how one region is compiled, and what decides that. No other file of the package imports any.

Checked on 2.11.0, 2.13.0 and 2.15.0, as in `_torch.py`. Inductor is imported by those who compile: it takes a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing  # a region's own
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_DAMAGED = re.compile(r"(/\S+\.so): (?:file too short|invalid ELF header|cannot read file data|ELF load command)")
"""What the loader says of a library of which a part is missing."""


def compile_with_inductor(
    region: torch.fx.GraphModule, *, backward: bool, threads: int, symbolic: bool, mode: str = "default", alone: bool = False
) -> Any:
    """Compile one region for `threads` threads; the result takes a list of inputs, empties it, and returns the outputs.

    Each region has its own compile context, since otherwise the strides of one leak into another. All outputs are visible to the
    user, so that they keep the strides that the rest of the graph was traced with. Random operators run as in eager PyTorch.

    A `symbolic` region doesn't use Inductor's cache of graphs, which can't tell its guards from those of its graph; the cache of
    compiled C++ serves it. With `alone` Inductor's thread pool isn't used, since a forked process doesn't have its threads.
    """
    from torch._inductor import config as inductor_config  # noqa: PLC0415  (a second of imports, for those who compile)
    from torch._inductor import list_mode_options  # noqa: PLC0415  (documented, in a private module)
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415  (Inductor without AOTAutograd around it)

    _call_in_place_products()
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(region.graph.nodes) if node.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    values = [node.meta["val"] for node in placeholders]
    fakes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    settings: dict[str, Any] = {
        **list_mode_options(mode),
        "fallback_random": True,
        "cpp.threads": threads,
        "fx_graph_cache": inductor_config.fx_graph_cache and not symbolic,
    }
    if alone:
        settings["compile_threads"] = 1
    with tracing(TracingContext(fakes[0] if fakes else FakeTensorMode())), inductor_config.patch(settings):
        return compile_fx_inner(region, values, is_backward=backward)


def code_settings() -> str:
    """Return what else decides the code of a region, as text: Inductor's settings, and PyTorch's switches that it reads."""
    from torch._inductor import config as inductor_config  # noqa: PLC0415

    matmul = torch.backends.cuda.matmul
    switches = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    return repr((switches, sorted(inductor_config.save_config_portable(ignore_private_configs=False).items())))


def _call_in_place_products() -> None:
    """Let Inductor call `addmm_` and `baddbmm_` as eager PyTorch does.

    By default it does so with the layouts of the first region. With `CI` in the environment it doesn't, since there is a
    decomposition, which allocates a new sum.
    """
    from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback  # noqa: PLC0415

    for product in (torch.ops.aten.addmm_.default, torch.ops.aten.baddbmm_.default):
        if product not in lowerings:
            make_fallback(product, layout_constraint=constrain_to_fx_strides, warn=False)


def inductor_processes() -> int:
    """Return the number of processes for Inductor (TORCHINDUCTOR_COMPILE_THREADS; by default one per core)."""
    from torch._inductor.async_compile import get_compile_threads  # noqa: PLC0415

    return get_compile_threads()


def caches_compiled_regions() -> bool:
    """Return whether Inductor's caches on disk are enabled."""
    from torch._inductor import config as inductor_config  # noqa: PLC0415

    return bool(inductor_config.fx_graph_cache) and not inductor_config.force_disable_caches


def unwritable_inductor_cache() -> str:
    """Return why Inductor's cache directory can't be written; empty if it can."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir  # noqa: PLC0415

    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    try:
        with tempfile.TemporaryFile(dir=cache_dir()):
            return ""
    except OSError as error:
        return (
            f"its cache directory {directory} can't be written to: {error.strerror}; set TORCHINDUCTOR_CACHE_DIR to a directory "
            "that this process may write to"
        )


def remove_damaged_library(error: Exception) -> bool:
    """Remove the library in Inductor's cache that can't be loaded, if that is the error; return whether it is gone.

    A process that is killed while a compiler writes leaves part of one, which Inductor takes for a whole one from then on.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415

    found = _DAMAGED.search(str(error))
    if found is None or not Path(found[1]).resolve().is_relative_to(Path(cache_dir()).resolve()):
        return False
    with contextlib.suppress(OSError):
        Path(found[1]).unlink(missing_ok=True)  # another rank may have been first
    return not Path(found[1]).exists()


def vector_isa_probes() -> list[Callable[[], bool]]:
    """Return the checks of vector instructions that Inductor runs sequentially before it generates C++; they cache results."""
    from torch._inductor import compile_fx, cpu_vec_isa  # noqa: F401, PLC0415  (imports all of Inductor before threads use it)

    if platform.machine() not in ("x86_64", "AMD64"):
        return [lambda: bool(cpu_vec_isa.valid_vec_isa_list())]
    flags = cpu_vec_isa.x86_isa_checker()
    isas = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
    return [functools.partial(bool, isa) for isa in isas]


def inductor_decompositions() -> dict[Any, Any]:
    """Return Inductor's decompositions, without that of dropout, so that its random numbers are eager PyTorch's."""
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    table = select_decomp_table()
    return {op: rule for op, rule in table.items() if op is not torch.ops.aten.native_dropout.default}
