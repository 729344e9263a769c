"""`normal_` and `uniform_` on the CPU with the numbers that PyTorch draws, sooner.

PyTorch draws number after number on one core: a model of billions of parameters takes longer to be given its first values than
to be written to a drive. What each element becomes depends on numbers of MT19937 whose place in the sequence is known. So parts
of a tensor are drawn at the same time, each from the state that the numbers before it leave; where it has the type that most
models have, by loops of our own, which use a processor's wide registers.

Nobody has promised us PyTorch's numbers. That the loops give the same, bit by bit, is seen in a million of them before the first
use, and in the first elements of each tensor; that a part took the numbers it should, in the state it leaves. Where not, PyTorch
draws.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .mersenne import Stream

_LEAST_NUMEL = 1 << 20
"""What PyTorch draws in a few milliseconds it may draw alone."""
_GROUP = 16
"""`normal_` makes that many elements at a time; for a rest it takes other numbers."""
_COMPARED_NUMEL, _COMPARED_FIRST = 1 << 20, 1 << 12
"""Elements of the trial before the first use, and of each tensor; multiples of `_GROUP`."""

_UNIFORM, _NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default
_LOOPS: dict[Any, Callable[..., None]] = {_UNIFORM: Stream.uniform, _NORMAL: Stream.normal}
_SETTINGS = {_UNIFORM: (0.0, 1.0), _NORMAL: (0.0, 1.0)}
_LOOP_DTYPES = frozenset({torch.float32, torch.bfloat16})
_WORDS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 1, torch.float64: 2}
"""Numbers of MT19937 for each element."""


class SoonerDraws(TorchDispatchMode):
    """Context in which `normal_` and `uniform_` of contiguous tensors on the CPU give their values sooner.

    Values, and the state of PyTorch's generator afterwards, are those without it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Draw what is large; do anything else as it is."""
        if func in _LOOPS and not kwargs and _is_large(args[0]):
            flat, settings = args[0].detach().view(-1), (*args[1:], *_SETTINGS[func][len(args) - 1 :])
            if _draw_by_loops(func, flat, settings) or _draw_in_parts(func, flat, settings):
                return args[0]
        return func(*args, **(kwargs or {}))


def _is_large(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.numel() >= _LEAST_NUMEL
        and tensor.device.type == "cpu"
        and tensor.dtype in _WORDS
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


def _draw_by_loops(func: Any, flat: torch.Tensor, settings: Sequence[float]) -> bool:
    """Let PyTorch draw the first elements, for comparison, and the last, 16 to 31; say whether the rest was drawn."""
    if flat.dtype not in _LOOP_DTYPES or not all(map(math.isfinite, settings)) or not _loops_agree(func, flat.dtype):
        return False
    generator, draw = torch.default_generator, _LOOPS[func]
    before, compared = generator.get_state(), torch.empty(_COMPARED_FIRST, dtype=flat.dtype)
    stream = Stream(before)
    draw(stream, compared, *settings)
    if not torch.equal(func(flat[:_COMPARED_FIRST], *settings), compared):
        generator.set_state(before)
        return False
    last = flat.numel() // _GROUP * _GROUP - _GROUP
    cuts = _cut(_COMPARED_FIRST, last)
    with ThreadPoolExecutor(len(cuts)) as pool:
        drawn = []
        for start, end in cuts:  # the first part is drawn while the second one's state is found
            part = stream.ahead(start - _COMPARED_FIRST)
            drawn.append(pool.submit(draw, part, flat[start:end], *settings))
        for future in drawn:
            future.result()
    generator.set_state(part.state())
    func(flat[last:], *settings)
    return True


@functools.cache
def _loops_agree(func: Any, dtype: torch.dtype) -> bool:
    """Compare a million elements with PyTorch's: what differs now and then shows among so many."""
    generator = torch.Generator()
    for seed, settings in enumerate([(0.0, 1.0), (-0.02, 0.03)]):
        stream, compared = Stream(generator.manual_seed(seed).get_state()), torch.empty(_COMPARED_NUMEL, dtype=dtype)
        _LOOPS[func](stream, compared, *settings)
        same = torch.equal(func(torch.empty_like(compared), *settings, generator=generator), compared)
        if not same or not torch.equal(stream.state(), generator.get_state()):
            return False
    return True


def _draw_in_parts(func: Any, flat: torch.Tensor, settings: Sequence[float]) -> bool:
    """Let PyTorch draw parts at the same time; say whether that was done and each left off where the next one began."""
    cuts = _cut(0, flat.numel())
    if len(cuts) < 2:
        return False
    stream = Stream(torch.default_generator.get_state())
    begins = [stream.ahead(_WORDS[flat.dtype] * start).state() for start, _ in cuts]

    def draw(begin: torch.Tensor, cut: tuple[int, int]) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(begin)
        with torch.no_grad():
            func(flat[slice(*cut)], *settings, generator=generator)
        return generator.get_state()

    with ThreadPoolExecutor(len(cuts)) as pool:
        ends = list(pool.map(draw, begins, cuts))
    meets = all(map(torch.equal, ends, begins[1:]))
    if meets:
        torch.default_generator.set_state(ends[-1])
    return meets


def _cut(start: int, end: int) -> list[tuple[int, int]]:
    """Cut a stretch into one part for each thread of PyTorch, all but the last of whole groups."""
    count = max(1, min(torch.get_num_threads(), (end - start) // _LEAST_NUMEL))
    step = -(-(end - start) // count // _GROUP) * _GROUP
    return list(itertools.pairwise([*range(start, start + count * step, step), end]))


__all__ = ["SoonerDraws"]
