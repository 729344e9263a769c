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

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from zinf_compile._torch import TorchDispatchMode

from .mt19937 import Stream, is_state

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
            flat, settings = args[0].detach().view(-1), settings_of(func, args)
            if _draw_by_loops(func, flat, settings) or _draw_in_parts(func, flat, settings):
                return args[0]
        return func(*args, **(kwargs or {}))


def is_draw(func: Any) -> bool:
    """Say whether an operator is one that this file knows."""
    return func in _LOOPS


def settings_of(func: Any, args: Sequence[Any]) -> tuple[float, ...]:
    """Return what an operator is given beside its tensor."""
    return (*args[1:], *_SETTINGS[func][len(args) - 1 :])


def _is_large(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.numel() >= _LEAST_NUMEL
        and tensor.device.type == "cpu"
        and tensor.dtype in _WORDS
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


@dataclasses.dataclass(frozen=True)
class Fill:
    """What `normal_` or `uniform_` would make of a flat tensor: any part of it can be made at any time."""

    func: Any
    settings: tuple[float, ...]
    dtype: torch.dtype
    stream: Stream
    """Before the first element."""
    last: int
    """A multiple of `_GROUP`: the first element that PyTorch has made already, as it doesn't make the last ones as the others."""
    tail: torch.Tensor

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.last + self.tail.numel()

    def whole(self, flat: torch.Tensor) -> None:
        """Fill the tensor, with as many threads as PyTorch has."""
        cuts = _cut(0, self.numel)
        with ThreadPoolExecutor(len(cuts)) as pool:  # the first part is made while the second one's place is found
            makers = self.parts(start for start, _ in cuts)
            made = [pool.submit(make, flat[slice(*cut)]) for make, cut in zip(makers, cuts, strict=True)]
            for future in made:
                future.result()

    def parts(self, starts: Iterable[int]) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield, for parts that begin at these elements, one after the other, what fills a tensor with it; any thread may."""
        stream, before = self.stream, 0
        for start in starts:
            first = min(start, self.last) // _GROUP * _GROUP
            stream, before = stream.ahead(first - before), first
            yield functools.partial(self._make, stream.ahead(0), start)

    def identity(self) -> int:
        """Return what is equal for equal tensors."""
        what = f"{self.func} {self.settings} {self.dtype} {self.numel} ".encode()
        return int.from_bytes(hashlib.blake2b(what + bytes(self.stream.state().numpy()), digest_size=8).digest(), "little")

    def _make(self, stream: Stream, start: int, into: torch.Tensor) -> None:
        draw, end = _LOOPS[self.func], start + into.numel()
        group = torch.empty(_GROUP, dtype=self.dtype)
        place, until = start, min(end, self.last)
        while place < until:
            skip = place % _GROUP
            count = min(_GROUP - skip, until - place) if skip or until - place < _GROUP else (until - place) // _GROUP * _GROUP
            part = into[place - start : place - start + count]
            if count % _GROUP:  # within a group
                draw(stream, group, *self.settings)
                part.copy_(group[skip : skip + count])
            else:
                draw(stream, part, *self.settings)
            place += count
        if end > self.last:
            from_, to = max(start, self.last), end
            into[from_ - start : to - start].copy_(self.tail[from_ - self.last : to - self.last])


def is_made_by_loops(numel: int, dtype: torch.dtype) -> bool:
    """Say whether a contiguous tensor is one that the loops may make."""
    return numel >= _LEAST_NUMEL and dtype in _LOOP_DTYPES


def loops_agree(dtype: torch.dtype) -> bool:
    """Say whether here the loops make what PyTorch does."""
    return all(_loops_agree(func, dtype) for func in _LOOPS)


def plan_fill(func: Any, numel: int, dtype: torch.dtype, settings: Sequence[float]) -> Fill | None:
    """Return what `func` would make of a flat tensor, and let the generator go on after it; None where it must be made now.

    The first elements, and the last 16 to 31, are made by PyTorch, for comparison and because they are made in another way.
    """
    if func not in _LOOPS or not is_made_by_loops(numel, dtype) or not all(map(math.isfinite, settings)):
        return None
    if not _loops_agree(func, dtype):
        return None
    generator = torch.default_generator
    before = generator.get_state()
    stream, compared = Stream(before), torch.empty(_COMPARED_FIRST, dtype=dtype)
    _LOOPS[func](stream.ahead(0), compared, *settings)
    if not torch.equal(func(torch.empty_like(compared), *settings), compared):
        generator.set_state(before)
        return None
    last = numel // _GROUP * _GROUP - _GROUP
    generator.set_state(stream.ahead(last).state())
    tail = func(torch.empty(numel - last, dtype=dtype), *settings)
    return Fill(func, tuple(settings), dtype, stream, last, tail)


def _draw_by_loops(func: Any, flat: torch.Tensor, settings: Sequence[float]) -> bool:
    """Fill a tensor by loops of our own; say whether that was done."""
    fill = plan_fill(func, flat.numel(), flat.dtype, settings)
    if fill is not None:
        fill.whole(flat)
    return fill is not None


@functools.cache
def _loops_agree(func: Any, dtype: torch.dtype) -> bool:
    """Compare a million elements with PyTorch's: what differs now and then shows among so many."""
    generator = torch.Generator()
    if not is_state(generator.get_state()):
        return False
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
    if len(cuts) < 2 or not is_state(torch.default_generator.get_state()):
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


__all__ = ["Fill", "SoonerDraws", "is_draw", "is_made_by_loops", "loops_agree", "plan_fill", "settings_of"]
