"""Messages of refusals for lack of memory: the bytes needed, the smallest cap that works, and options that take less.

Raised from by the checks in `budget`, before anything is made that would exceed a cap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from zinf_compile.config import Config
from zinf_compile.errors import BudgetError
from zinf_compile.ir.compute_shape import LEAST_TILE, default_tile
from zinf_compile.ir.placements import KINDS
from zinf_compile.ir.tiers import Placement, Tier, Topology
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.named_caps import name_host_memory, options_to_raise
from zinf_compile.runtime.units.unit import Unit

from .allowed_homes import allowed_homes
from .short_ranks import Worst

BATCH_TOO_LARGE = "With this batch the rank is out of memory. A smaller one may fit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """The need of one graph for memory of the device, or of the host beside it, in bytes."""

    side: Tier
    """device or host."""
    text: str
    """The parts of the need; a message begins with them."""
    fixed: int
    """The part of `least` that doesn't depend on tiles."""
    least: int
    """The smallest cap with which forward and backward run."""
    added_by_steps: int
    """Added at the first steps: two states for each parameter, and second gradients, where these are kept there."""
    cap: int
    options: Mapping[str, int]
    """The options of which `cap` is the smallest, each with the ranks that share it."""
    source: str
    advice: str = ""
    compute: int = 0
    """The part of `least` that the batch decides: activations and temporaries."""
    strict: bool = False
    """Whether what is added later must fit now: where homes are decided, they are decided for all of it."""
    to_come: int = 0
    """Of an evaluation: what a backward of the same parameters may take beside `works`, by an estimate."""

    @property
    def needed(self) -> int:
        """The smallest cap that isn't refused."""
        return self.works if self.strict else self.least

    @property
    def works(self) -> int:
        """The smallest cap with which training goes on: forward, backward, accumulation, and steps of an optimizer like Adam."""
        return self.least + self.added_by_steps


def refusal(needs: Sequence[Need], smallest: Mapping[Tier, int], tile: int | None = None) -> BudgetError | None:
    """Return the error for graphs that don't fit; None where all do.

    `smallest` are the caps that work, by side; `tile`, the bytes of tiles with which they fit, but for parameters that are cut.
    """
    if all(need.needed <= need.cap for need in needs):
        return None
    worst = {}
    for side in (Tier.DEVICE, Tier.HOST):
        here = [need for need in needs if need.side == side]
        if here and max(smallest[side], *(need.works for need in here)) > here[0].cap:
            worst[side] = max(here, key=lambda need: need.works)
    if (
        len(worst) > 1 and worst[Tier.DEVICE].options.keys() == worst[Tier.HOST].options.keys()
    ):  # one option for both: the larger counts
        del worst[min(worst, key=lambda side: smallest[side])]
    tiles = ""
    if tile is not None:
        tiles = (
            f". With tiles of {tile:,} bytes it fits in what is allowed: give option tile={tile} where parameters are partitioned"
        )
    return BudgetError(". ".join(_part(need, smallest[side]) for side, need in worst.items()) + tiles)


def refusal_elsewhere(needs: Sequence[Need], smallest: Mapping[Tier, int], worst: Mapping[Tier, Worst]) -> BudgetError:
    """Return the error of a rank for whom the graphs fit, while they don't for another one."""
    said = []
    for side, (rank, needed, _) in worst.items():
        need = next(need for need in needs if need.side == side)
        said.append(
            f"the model needs {needed:,} bytes on the {side} of rank {rank}. {need.cap:,} are allowed ({need.source}); "
            f"{name_smallest(need.options, smallest[side])}{_of_batch(need, needed)}"
        )
    return BudgetError(". ".join(said))


def _part(need: Need, works: int) -> str:
    named = name_smallest(need.options, works)
    what = (
        f"{need.text}. {need.cap:,} are allowed ({need.source}); {named}"
        if need.needed > need.cap
        else f"{need.side} memory then needs more as well: {need.cap:,} bytes are allowed ({need.source}); {named}"
    )
    if need.added_by_steps:
        what += (
            f". Of these {need.added_by_steps:,} are for what comes after the first backward: two states for each parameter, "
            "as Adam keeps, and second gradients while they accumulate, where these are kept there"
        )
    if works <= need.cap:
        what += ". That is less than is allowed, and makes smaller tiles: option tile does so as well"
    return what + _of_batch(need, need.needed) + (f". {need.advice}" if need.advice else "")


def _of_batch(need: Need, needed: int) -> str:
    """Say so where a smaller batch might fit: in words that loops looking for a batch size know from CUDA's errors."""
    return f". {BATCH_TOO_LARGE}" if needed > need.cap >= needed - need.compute else ""


def name_smallest(options: Mapping[str, int], works: int) -> str:
    """Name the cap with which each rank may hold `works` bytes by `options` that set it, each with the ranks that share it."""
    if [*options] == ["host_memory"]:
        return f"the smallest host_memory that works is {works * options['host_memory']:,}"
    both = " and ".join(f"{works * ranks:,} of {option}" for option, ranks in options.items())
    more = f" ({both})" if len(options) > 1 else ""
    return f"the smallest that works is {works:,}{more}"


def advice(config: Config, placement: Placement, *, topology: Topology, side: Tier, several: bool = True) -> str:
    """Return the options that keep less on the device, or in host memory beside it; empty where none does.

    What lives there by a decision that had a drive to choose from lacks least there. `several`: units are gathered at once, or
    their gradients made, which a smaller bucket changes.
    """
    decided = {kind for kind, tiers in allowed_homes(config, topology).items() if len(tiers) > 1 and not tiers[-1].in_memory}
    kinds = [kind for kind in KINDS if kind not in decided and topology.side(getattr(placement, kind)) == side]
    said = ["A smaller `bucket` moves less at once"] if several and side == Tier.DEVICE else []
    if kinds:
        where = "'nvme'" if side == topology.side(Tier.HOST) else "'host' or 'nvme'"
        listed = ", ".join(kinds[:-1]) + " and " + kinds[-1] if len(kinds) > 1 else kinds[0]
        said.append(f"{listed} on {where} keep{'s' if kinds == ['optimizer'] else ''} less there")
    text = "; ".join(said)
    return text[:1].upper() + text[1:]


def reserved_by_others(count: int) -> str:
    """Return the part of a message about so many bytes."""
    return f"{count:,} are reserved for what other graphs compiled in this process take later, " if count else ""


def find_smallest(measure: Callable[[int], int], *, floor: int, edges: Callable[[int], tuple[int, int]]) -> int:
    """Return the smallest cap that is no less than what is needed under that cap.

    `measure(cap)` is what is needed where `cap` bytes are declared, the same between two `edges`: (first cap of such a range,
    first of the next one). The search begins at `floor`, goes down while a range needs less than it begins with, and then up.
    """
    cap = max(1, floor)
    first, following = edges(cap)
    needed = measure(cap)
    while needed < first:  # other homes are chosen under another cap
        lower = measure(first - 1)
        if lower >= first:
            return first
        needed, (first, following) = lower, edges(first - 1)
    while needed >= following:
        first, following = edges(following)
        needed = max(measure(first), first)
    return needed


def smaller_tiles(measure: Callable[[int], int], works: int, smaller: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield caps that work if they may have the tiles of smaller ones, each with a device_memory that has these.

    `works` is one that works as it is. Of each range of `smaller` ones, the largest first, `measure` returns what its tiles need.
    They are halved until two times in a row less than an eighth is saved: more of them are more transfers, and longer to trace.
    """
    in_vain = 0
    for cap in smaller:
        needed = max(measure(cap), cap)
        if needed == works:  # nothing is cut otherwise
            continue
        in_vain = 0 if needed <= works - works // 8 else in_vain + 1
        if needed < works:
            works = needed
            yield works, cap
        if in_vain == 2:
            return


def advice_for_shards(config: Config, placement: Placement, *, topology: Topology, side: Tier) -> str:
    """Return the text on memory that is taken later, and on options that keep less of parameters and gradients there."""
    placed = advice(config, dataclasses.replace(placement, optimizer=Tier.NVME), topology=topology, side=side, several=False)
    return f". Graphs say at their first call what they need besides{f'. {placed}' if placed else ''}"


def gradient_bytes(context: Context, units: Iterable[Unit]) -> dict[Tier, int]:
    """Return the bytes of these units' gradients that stay in memory, by side."""
    topology = context.link.topology
    found = {Tier.DEVICE: 0, Tier.HOST: 0}
    placement: Placement | None = None
    for unit in units:
        if unit.placement is not placement:  # most have that of the one before
            placement, side = unit.placement, topology.side(unit.placement.grads)
        if side is not None and (parameter := unit.parameter()) is not None and parameter.requires_grad:
            found[side] += unit.gradient_bytes
    return found


def name_cap(context: Context, side: Tier, works: int, *, smallest: bool = True) -> str:
    """Name the cap that works, by the options that set it: where the device is host memory, one of them or both.

    It may not be the `smallest`: some of it, or none, is for units that stay gathered.
    """
    if side == Tier.HOST:
        return name_host_memory(works)
    named = [
        name_host_memory(works, smallest=smallest)
        if option == "host_memory"
        else name_device_memory(context, works, smallest=smallest)
        for option in options_to_raise(context.memory, context.memory.ledger, works)
    ]
    return "; ".join(named) + ("" if smallest else ", or less with reshard_after_forward=True")


def name_device_memory(context: Context, works: int, *, smallest: bool = True) -> str:
    """Name the `device_memory` that works; where its default tile would be another than the model's as it is, that as well."""
    reservations = context.memory.reservations
    now, then = (default_tile(cap) for cap in (reservations.tiles_of or 0, works))
    text = f"{'the smallest' if smallest else 'a'} device_memory that works is {works:,}"
    if reservations.tiles_of is not None and now != then:
        largest = max((unit.bytes for unit in context.units), default=0)
        text += f", with option tile={now or max(largest, LEAST_TILE)}, as here"
    return text
