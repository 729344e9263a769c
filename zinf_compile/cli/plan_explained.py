"""`zinf plan --explain`: the formulas of ZeRO and ZeRO-Infinity with a model's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from zinf_compile.plan import formulas
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.profile import Profile


def explained(problem: StepProblem, profile: Profile, *, tokens: int) -> str:
    """Return a table: each formula, and what it comes to for this model, these ranks and this machine."""
    rows = [[name, formula, value] for name, formula, value in _rows(problem, profile, tokens)]
    return tabulate(rows, headers=["of one rank", "formula", "here"], disable_numparse=True)


def _rows(problem: StepProblem, profile: Profile, tokens: int) -> Iterator[tuple[str, str, str]]:
    world = problem.world_size
    stored = sum(unit.stored_bytes for unit in problem.units if unit.trained)
    states = sum(piece.state_bytes for piece in problem.pieces)
    width = 4 if _is_wide(stored, states) else 2
    numel = stored * world / width
    each = states * world / numel if numel else 0.0
    numbers = {"Psi": numel, "N": world, "v": width, "K": each}
    for stage, formula in formulas.MODEL_STATES.items():
        own = {symbol.name: numbers[symbol.name] for symbol in formula.free_symbols}
        yield f"model states, ZeRO-{stage}", str(formula), _decimal(formulas.evaluate(formula, **own), "B")
    for stage, formula in formulas.MOVED.items():
        yield f"elements received, ZeRO-{stage}", str(formula), _decimal(formulas.evaluate(formula, Psi=numel, N=world), "")
    peak = profile.flops("float32" if width == 4 else "bfloat16")
    for name in ("parameters and gradients", "optimizer states"):
        intensity = formulas.evaluate(formulas.INTENSITIES[name], b=1, s=tokens)
        for link in problem.links:
            if link.source is None or link.destination is None or link.source.distance < link.destination.distance:
                continue
            rate = link.bytes_per_second / link.sharers
            share = formulas.evaluate(formulas.EFFICIENCY, ait=intensity, bw=rate, peak=peak)
            yield f"efficiency, {name}, {link.name}", str(formulas.EFFICIENCY), f"{share:.0%} at {intensity:,.0f} FLOP/byte"


def _decimal(count: float, unit: str) -> str:
    """Return a number in thousands, millions or billions of a unit."""
    factor, prefix = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= pair[0]), (1.0, ""))
    return f"{count / factor:,.1f} {prefix}{unit}".rstrip()


def _is_wide(stored: int, states: int) -> bool:
    """Say whether parameters have 4 bytes: then Adam's two states have twice as many, and else six times as many."""
    return states < 4 * stored
