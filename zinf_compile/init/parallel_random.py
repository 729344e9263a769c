"""`normal_` and `uniform_` on the CPU with the numbers that PyTorch draws, any range of a tensor by itself.

PyTorch draws number after number on one core. Which numbers of MT19937 become which element is known, so PyTorch's own kernel
draws a range of a tensor from the state that the elements before it leave: on several threads at once, or on the rank that
keeps the range.

Note: groups. `normal_` makes 16 elements of 16 uniform numbers, and where a size is no multiple of 16, it draws the last 16
elements again, from numbers of their own. A range is therefore drawn from a multiple of 16 to another, and the last 16 to 31
elements together. `uniform_` makes each element by itself; the same cut suits it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from zinf_compile._torch import TorchDispatchMode

from .mt19937 import Stream, is_state

_LEAST_NUMEL = 1 << 20
"""Elements that PyTorch draws in a few milliseconds by itself."""
_GROUP = 16
"""See the note on groups."""

_UNIFORM, _NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default
_SETTINGS = {_UNIFORM: (0.0, 1.0), _NORMAL: (0.0, 1.0)}
_WORDS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 1, torch.float64: 2}
"""Numbers of MT19937 for each element."""


class ParallelDraws(TorchDispatchMode):
    """Context in which `normal_` and `uniform_` of large contiguous tensors on the CPU draw on several threads.

    Values, and the state of PyTorch's generator afterwards, are those without it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Draw what is large; do anything else as it is."""
        if is_draw(func) and not kwargs and _is_large(args[0]):
            flat = args[0].detach().view(-1)
            fill = plan_fill(func, flat.numel(), flat.dtype, settings_of(func, args))
            if fill is not None:
                fill.whole(flat)
                return args[0]
        return func(*args, **(kwargs or {}))


def is_draw(func: Any) -> bool:
    """Return whether an operator is one that this file knows."""
    return func in _SETTINGS


def settings_of(func: Any, args: Sequence[Any]) -> tuple[float, ...]:
    """Return what an operator is given beside its tensor."""
    return (*args[1:], *_SETTINGS[func][len(args) - 1 :])


def is_large(numel: int, dtype: torch.dtype) -> bool:
    """Return whether a contiguous tensor is one of which ranges are drawn by themselves."""
    return numel >= _LEAST_NUMEL and dtype in _WORDS


def _is_large(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and is_large(tensor.numel(), tensor.dtype)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


@dataclasses.dataclass(frozen=True)
class Fill:
    """The values that `normal_` or `uniform_` gives a flat tensor: any range of them can be made at any time."""

    func: Any
    settings: tuple[float, ...]
    dtype: torch.dtype
    stream: Stream
    """Before the first element."""
    last: int
    """A multiple of `_GROUP`: the first element of `tail`, see the note on groups."""
    tail: torch.Tensor

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.last + self.tail.numel()

    def whole(self, flat: torch.Tensor) -> None:
        """Fill the tensor, with as many threads as PyTorch has."""
        cuts = _cut(self.numel)
        with ThreadPoolExecutor(len(cuts)) as pool:  # the first part is made while the second one's state is found
            makers = self.parts(start for start, _ in cuts)
            made = [pool.submit(make, flat[slice(*cut)]) for make, cut in zip(makers, cuts, strict=True)]
            for future in made:
                future.result()

    def parts(self, starts: Iterable[int]) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield, for ranges that begin at these elements, one after the other, what fills a tensor with it; any thread may."""
        stream, before = self.stream, 0
        for start in starts:
            first = min(start, self.last) // _GROUP * _GROUP
            stream, before = stream.ahead(_WORDS[self.dtype] * (first - before)), first
            yield functools.partial(self._make, stream, start)

    def identity(self) -> int:
        """Return what is equal for equal tensors."""
        what = f"{self.func} {self.settings} {self.dtype} {self.numel} ".encode()
        return int.from_bytes(hashlib.blake2b(what + bytes(self.stream.state().numpy()), digest_size=8).digest(), "little")

    def _make(self, stream: Stream, start: int, into: torch.Tensor) -> None:
        generator, end = stream.generator(), start + into.numel()
        place, until = start, min(end, self.last)
        while place < until:
            skip = place % _GROUP
            count = min(_GROUP - skip, until - place) if skip or until - place < _GROUP else (until - place) // _GROUP * _GROUP
            part = into[place - start : place - start + count]
            if count % _GROUP:  # within a group
                group = torch.empty(_GROUP, dtype=self.dtype, device="cpu")
                part.copy_(self.func(group, *self.settings, generator=generator)[skip : skip + count])
            else:
                self.func(part, *self.settings, generator=generator)
            place += count
        if end > self.last:
            from_ = max(start, self.last)
            into[from_ - start :].copy_(self.tail[from_ - self.last : end - self.last])


def plan_fill(func: Any, numel: int, dtype: torch.dtype, settings: Sequence[float]) -> Fill | None:
    """Return what `func` makes of a flat tensor, and let the generator go on after it; None where it must be drawn now."""
    if not is_draw(func) or not is_large(numel, dtype) or not _parts_agree(func, dtype):
        return None
    return _plan(func, numel, dtype, settings, torch.default_generator)


def parts_agree(dtype: torch.dtype) -> bool:
    """Return whether in this version of PyTorch ranges drawn by themselves are those of the whole."""
    return all(_parts_agree(func, dtype) for func in _SETTINGS)


@functools.cache
def _parts_agree(func: Any, dtype: torch.dtype) -> bool:
    """Draw a small tensor in both ways: PyTorch promises nobody how many numbers an element takes, nor groups of 16."""
    numel, starts = 1000 + 5, (0, 301, 997)
    generator, other = torch.Generator(), torch.Generator()
    if not is_state(generator.get_state()):
        return False
    whole = func(torch.empty(numel, dtype=dtype, device="cpu"), 0.25, 0.75, generator=generator)
    drawn = torch.empty_like(whole)
    for make, (start, end) in zip(
        _plan(func, numel, dtype, (0.25, 0.75), other).parts(starts), itertools.pairwise((*starts, numel)), strict=True
    ):
        make(drawn[start:end])
    return torch.equal(whole, drawn) and torch.equal(generator.get_state(), other.get_state())


def _plan(func: Any, numel: int, dtype: torch.dtype, settings: Sequence[float], generator: torch.Generator) -> Fill:
    stream, last = Stream(generator.get_state()), numel // _GROUP * _GROUP - _GROUP
    after = stream.ahead(_WORDS[dtype] * last).generator()
    tail = func(torch.empty(numel - last, dtype=dtype, device="cpu"), *settings, generator=after)
    generator.set_state(after.get_state())
    return Fill(func, tuple(settings), dtype, stream, last, tail)


def _cut(numel: int) -> list[tuple[int, int]]:
    """Cut a tensor into one part for each thread of PyTorch, all but the last of whole groups."""
    count = max(1, min(torch.get_num_threads(), numel // _LEAST_NUMEL))
    step = -(-numel // count // _GROUP) * _GROUP
    return list(itertools.pairwise([*range(0, count * step, step), numel]))


__all__ = ["Fill", "ParallelDraws", "is_draw", "is_large", "parts_agree", "plan_fill", "settings_of"]
