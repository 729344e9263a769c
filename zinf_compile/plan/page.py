"""One page with the timelines of plans: every lane, and memory by tier under its cap, budgets one below the other. No script, no
other file."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zinf_compile.ir.tiers import Tier

from .problem import StepProblem
from .simulate import Span, Timeline
from .table import in_seconds, rounded_up
from .unroll import COMPUTE

WIDTH, LEFT, ROW, HEIGHT = 1200, 140, 22, 90
"""Pixels: of a step, of the names beside it, of a lane, of a memory."""
COLORS = ("#4878a8", "#c8843c", "#5c9c5c", "#a85c8c", "#8c8c3c", "#5c9ca8", "#a8685c", "#786ca8")
STYLE = """body{font:14px sans-serif;margin:24px;color:#222}svg{display:block;margin:8px 0 4px}svg text{font-size:12px}
table{border-collapse:collapse;margin:8px 0}td,th{padding:2px 12px 2px 0;text-align:left}h2{margin-top:32px}"""


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A plan on the page, and its part of `zinf plan --json`. Without a timeline it is one that does not fit."""

    title: str
    problem: StepProblem
    timeline: Timeline | None
    report: Mapping[str, Any]


def page(title: str, plans: Sequence[Shown]) -> str:
    """Return the page. All plans are drawn to the same scale, that of the longest step."""
    longest = max((shown.timeline.seconds for shown in plans if shown.timeline is not None), default=1.0) or 1.0
    body = "\n".join(_section(shown, longest) for shown in plans)
    name = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n<style>{STYLE}</style></head>\n'
        f"<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    )


def _section(shown: Shown, longest: float) -> str:
    parts = [f"<h2>{html.escape(shown.title)}</h2>"]
    if shown.timeline is None:
        given = {str(memory.tier): memory.bytes for memory in shown.problem.memories}
        least = {tier: count for tier, count in (shown.report.get("least") or {}).items() if count != given.get(tier)}
        text = ", ".join(f"{tier} {rounded_up(count)}" for tier, count in least.items()) or "none"
        return "\n".join(
            [*parts, f"<p>It does not fit. The least that does, where no saved value moves: {html.escape(text)}.</p>"]
        )
    timeline, report = shown.timeline, shown.report
    parts.append(
        f"<p>step {in_seconds(timeline.seconds)}, bound {in_seconds(report['bound'])} by {html.escape(report['bound_by'])}, "
        f"{report['tokens_per_second']:,.1f} tokens/s</p>"
    )
    parts.append(_lanes(timeline, WIDTH / longest))
    for memory in shown.problem.memories:
        if memory.tier.in_memory:
            parts.append(memory_chart(memory.tier, timeline, shown.problem.room(memory.tier), WIDTH / longest))
    return "\n".join(parts)


def _lanes(timeline: Timeline, scale: float) -> str:
    names = sorted(timeline.lanes, key=lambda name: (name != COMPUTE, name))
    rows = []
    for number, name in enumerate(names):
        y = number * ROW
        rows.append(f'<text x="0" y="{y + 15}">{html.escape(name)}</text>')
        rows += bars(timeline.lanes[name], timeline.seconds, scale, y, COLORS[number % len(COLORS)])
    height = len(names) * ROW
    end = LEFT + timeline.seconds * scale
    rows.append(f'<line x1="{end:.1f}" y1="0" x2="{end:.1f}" y2="{height}" stroke="#222"/>')
    return f'<svg class="lanes" width="{LEFT + WIDTH + 10}" height="{height}">{"".join(rows)}</svg>'


def bars(spans: Sequence[Span], seconds: float, scale: float, y: int, color: str) -> Iterator[str]:
    """Yield a rectangle for each span; those that touch within half a pixel, and are that small, are one."""
    inside = [(max(0.0, s.start), min(seconds, s.end), s.name) for s in spans if s.end > 0 and s.start < seconds]
    joined: list[tuple[float, float, str]] = []
    for start, end, name in sorted(inside):
        small = (end - start) * scale < 0.5
        if small and joined and (start - joined[-1][1]) * scale < 0.5 and (joined[-1][1] - joined[-1][0]) * scale < 4:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]), f"{joined[-1][2].split(' … ')[0]} … {name}")
        else:
            joined.append((start, end, name))
    for start, end, name in joined:
        place = f'x="{LEFT + start * scale:.2f}" y="{y + 3}" width="{max(0.3, (end - start) * scale):.2f}" height="{ROW - 6}"'
        title = f"{html.escape(name)}: {start:.4f} to {end:.4f} s"
        yield f'<rect {place} fill="{color}" stroke="#fff" stroke-width="0.3"><title>{title}</title></rect>'


def memory_chart(tier: Tier, timeline: Timeline, room: float, scale: float) -> str:
    points = timeline.memory[tier]
    peak = timeline.peak[tier]
    capped = room != float("inf")
    top = max(room if capped else 0, peak, 1)

    def y(count: float) -> float:
        return HEIGHT - count / top * (HEIGHT - 14)

    line = [f"M{LEFT} {HEIGHT}"]
    for when, count in points:
        line.append(f"H{LEFT + min(when, timeline.seconds) * scale:.2f}V{y(count):.2f}")
    line.append(f"H{LEFT + timeline.seconds * scale:.2f}V{HEIGHT}Z")
    cap = ""
    if capped:
        cap = f'<line class="cap" x1="{LEFT}" y1="{y(room):.2f}" x2="{LEFT + WIDTH}" y2="{y(room):.2f}" stroke="#c03030"/>'
    label = f"{_bytes(peak)}" + (f" of {_bytes(int(room))}" if capped else "")
    return (
        f'<svg class="memory" width="{LEFT + WIDTH + 10}" height="{HEIGHT + 2}">'
        f'<text x="0" y="30">{html.escape(str(tier))}</text><text x="0" y="46">{label}</text>'
        f'<path d="{"".join(line)}" fill="#b8c8d8"/>{cap}</svg>'
    )


def _bytes(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**28 else f"{count / 2**20:,.2f} MiB"
