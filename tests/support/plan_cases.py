"""Problems for planners: like those of `facts`, by seed, and by hypothesis."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.planners import just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Beside, Link, Memory, Region, SavedValue, StatePiece, Unit

SHARES = (0.15, 0.2, 0.3, 0.45, 0.6)
"""Of all bytes, for budgets."""


def links(down: float, up: float | None = None, far: Tier = Tier.NVME, near: Tier = Tier.DEVICE) -> tuple[Link, ...]:
    """Return both directions between two tiers."""
    return (
        Link(name=f"{far} to {near}", source=far, destination=near, bytes_per_second=down),
        Link(name=f"{near} to {far}", source=near, destination=far, bytes_per_second=up or down),
    )


def read_only(seed: int, blocks: int, share: float, *, rate: float | None = None) -> StepProblem:
    """Return one link and frozen units of uneven sizes, each used by a block forward and backward; a budget of `share` of all."""
    draw = random.Random(seed)
    sizes = [draw.randint(20, 100) for _ in range(blocks)]
    forward = [draw.uniform(0.5, 1.5) for _ in range(blocks)]
    seconds = [*forward, *(2 * each for each in reversed(forward))]
    rate = rate or sum(sizes) * 2 / sum(seconds) * draw.uniform(0.5, 1.5)
    regions = tuple(Region(name=f"r{number}", seconds=each) for number, each in enumerate(seconds))
    units = tuple(
        Unit(name=f"u{number}", stored_bytes=size, uses=(number, 2 * blocks - 1 - number)) for number, size in enumerate(sizes)
    )
    budget = max(int(share * sum(sizes)), *sizes)
    return StepProblem(
        regions=regions,
        units=units,
        memories=(Memory(tier=Tier.DEVICE, bytes=budget), Memory(tier=Tier.NVME)),
        links=links(rate),
        name=f"read-only {seed}",
    )


def read_only_problems(blocks: tuple[int, int] = (1, 14)) -> st.SearchStrategy[StepProblem]:
    """Return problems as `read_only` makes them, those in which nothing has to move among them."""
    return st.builds(
        read_only,
        seed=st.integers(0, 1 << 16),
        blocks=st.integers(*blocks),
        share=st.floats(0.0, 1.0),
        rate=st.one_of(st.none(), st.floats(5.0, 500.0)),
    )


def training(
    seed: int,
    blocks: int,
    *,
    world: int = 1,
    tiers: int = 3,
    micro_batches: int = 1,
    saved: bool = True,
    device: float = 0.4,
    host: float = 0.5,
    speed: float = 1.0,
    even: bool = False,
) -> StepProblem:
    """Return training with Adam: bf16 units, fp32 gradients, 12 bytes of states an element, an activation for each block.

    `device` and `host` are budgets, as a share of what it takes to keep everything there. `speed` scales all links.
    """
    draw = random.Random(seed)
    numel = [100 if even else draw.randint(20, 100) for _ in range(blocks)]
    cost = [1.0 if even else draw.uniform(0.5, 1.5) for _ in range(blocks)]
    saved_bytes = [160 if even else draw.randint(20, 300) for _ in range(blocks)]
    order = [*range(blocks), *reversed(range(blocks))]
    regions, units, values, pieces = [], [], [], []
    for batch in range(micro_batches):
        for place, block in enumerate(order):
            name = f"{'backward' if place >= blocks else 'forward'} {block}"
            seconds = cost[block] * (2 if place >= blocks else 1)
            regions.append(
                Region(
                    name=name,
                    seconds=seconds,
                    workspace_bytes=20,
                    structure="backward" if place >= blocks else "forward",
                    micro_batch=batch,
                )
            )
    for block, size in enumerate(numel):
        uses = [(2 * blocks * batch + block, 2 * blocks * (batch + 1) - 1 - block) for batch in range(micro_batches)]
        shard = -(-size // world)
        gathered = {"full_bytes": 2 * size, "wire_bytes": 2 * size - 2 * shard} if world > 1 else {}
        reduced = {"full_gradient_bytes": 4 * size, "reduced_bytes": 4 * size - 4 * shard} if world > 1 else {}
        units.append(
            Unit(
                name=f"w{block}",
                stored_bytes=2 * shard,
                uses=tuple(use for pair in uses for use in pair),
                trained=True,
                gradients=tuple(pair[1] for pair in uses),
                gradient_bytes=4 * shard,
                structure="w",
                **gathered,
                **reduced,
            )
        )
        pieces.append(
            StatePiece(
                name=f"s{block}",
                units=(f"w{block}",),
                state_bytes=12 * shard,
                read_bytes=12 * shard,
                written_bytes=12 * shard,
                value_bytes=2 * shard,
                gradient_bytes=4 * shard,
                host_seconds=shard * (0.0005 if tiers == 1 else 0.005),  # the host is the device
                device_seconds=shard * 0.0005,
            )
        )
        for batch, (forward, backward) in enumerate(uses if saved else ()):
            below = block - 1
            values.append(
                SavedValue(
                    name=f"a{block}.{batch}",
                    bytes=saved_bytes[block],
                    made_in=forward,
                    used_in=(backward,) if block == blocks - 1 else (forward + 1, backward - 1, backward),
                    remade_by=(forward,),
                    remade_from=(f"a{below}.{batch}",) if block else (),
                    structure="a",
                )
            )
    total = sum(seconds.seconds for seconds in regions)
    rate = speed * sum(numel) * 10 / total
    memories = [Memory(tier=Tier.DEVICE)]
    every: tuple[Link, ...] = ()
    if tiers in (2, 3):
        memories.append(Memory(tier=Tier.HOST))
        every += links(4 * rate, far=Tier.HOST)
    if tiers in (1, 3):
        near = memories[-1].tier
        memories.append(Memory(tier=Tier.NVME))
        down, up = f"nvme to {near}", f"{near} to nvme"
        every += (
            Link(
                name=down,
                source=Tier.NVME,
                destination=near,
                bytes_per_second=2 * rate,
                beside=(Beside(link=up, bytes_per_second=rate),),
            ),
            Link(
                name=up,
                source=near,
                destination=Tier.NVME,
                bytes_per_second=1.5 * rate,
                beside=(Beside(link=down, bytes_per_second=0.75 * rate),),
            ),
        )
    if world > 1:
        every += (
            Link(name="gather", source=None, destination=Tier.DEVICE, bytes_per_second=8 * rate, lane="ranks"),
            Link(name="reduce", source=Tier.DEVICE, destination=None, bytes_per_second=8 * rate, lane="ranks"),
        )
    problem = StepProblem(
        regions=tuple(regions),
        units=tuple(units),
        saved=tuple(values),
        pieces=tuple(pieces),
        memories=tuple(memories),
        links=every,
        world_size=world,
        name=f"training {seed}",
    )
    return with_shares(problem, device, host)


def with_shares(problem: StepProblem, device: float, host: float) -> StepProblem:
    """Return the problem with budgets between what `just_in_time` takes (0) and what it takes to keep everything there (1)."""
    totals = occupied(problem, just_in_time(problem))
    kept = sum(unit.stored_bytes + unit.full_bytes + unit.gradient_bytes for unit in problem.units)
    kept += sum(value.bytes for value in problem.saved) + sum(piece.state_bytes for piece in problem.pieces)
    budgets = {}
    for tier, share in zip(problem.tiers, (device, host), strict=False):
        if tier.in_memory:
            least = int(totals[tier].max())
            budgets[str(tier)] = least + int(share * kept)
    return problem.with_budgets(**budgets)


def training_problems(blocks: tuple[int, int] = (1, 6), *, tiers: tuple[int, ...] = (1, 2, 3)) -> st.SearchStrategy[StepProblem]:
    """Return problems of training over all topologies, or those with so many tiers."""
    return st.builds(
        training,
        seed=st.integers(0, 1 << 16),
        blocks=st.integers(*blocks),
        world=st.sampled_from([1, 2, 4]),
        tiers=st.sampled_from(tiers),
        micro_batches=st.sampled_from([1, 2]),
        saved=st.booleans(),
        device=st.floats(0.0, 1.0),
        host=st.floats(0.0, 1.0),
        speed=st.sampled_from([0.1, 1.0, 10.0]),
    )
