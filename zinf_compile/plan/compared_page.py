"""One page with a step as it ran over the step as it was planned: every lane twice on one axis, and memory under its cap."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence

from zinf_compile.ir.tiers import Tier

from .page import COLORS, LEFT, ROW, STYLE, WIDTH, bars, memory_chart
from .simulate import Span, Timeline
from .unroll import COMPUTE, UPDATE

WAITS, ISSUE = "waits", "issue"
"""Lanes that only a measured step has: compute stands still; the host starts transfers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A measured step, and what was predicted of it."""

    title: str
    measured: Timeline
    planned: Timeline | None = None
    """None: nothing was planned, for the reason in `note`."""
    bound: float | None = None
    """Seconds below which no plan is."""
    caps: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane, in seconds."""

    lane: str
    busy: float
    exposed: float
    planned_busy: float | None
    planned_exposed: float | None


def lane_rows(measured: Timeline, planned: Timeline | None) -> list[LaneRow]:
    """Return what each lane was busy for, and compute waited for it, as measured and as planned."""
    return [
        LaneRow(
            lane,
            _busy(measured, lane),
            measured.waited.get(lane, 0.0),
            None if planned is None else _busy(planned, lane),
            None if planned is None else planned.waited.get(lane, 0.0),
        )
        for lane in _lanes(measured, planned)
        if lane not in (WAITS, ISSUE)
    ]


def compared_page(shown: Compared) -> str:
    """Return the page: no script, no other file."""
    measured, planned = shown.measured, shown.planned
    scale = WIDTH / (max(measured.seconds, planned.seconds if planned is not None else 0.0) or 1.0)
    name = html.escape(shown.title)
    parts = [f"<p>measured {measured.seconds:.3f} s{_predicted(shown)}</p>", _chart(measured, planned, scale)]
    for tier, points in measured.memory.items():
        if points:
            room = float(shown.caps.get(tier, 0)) or float("inf")
            parts.append(memory_chart(tier, measured, room, scale))
    parts.append(_table(lane_rows(measured, planned)))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n<style>{STYLE}</style></head>\n'
        f"<body><h1>{name}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _predicted(shown: Compared) -> str:
    if shown.planned is None:
        return f"; nothing was planned: {html.escape(shown.note)}" if shown.note else ""
    ratio = shown.measured.seconds / shown.planned.seconds if shown.planned.seconds else 0.0
    bound = "" if shown.bound is None else f", bound {shown.bound:.3f} s"
    return f", planned {shown.planned.seconds:.3f} s (measured / planned {ratio:.2f}){bound}"


def _lanes(measured: Timeline, planned: Timeline | None) -> list[str]:
    names = {*measured.lanes, *measured.waited, *(planned.lanes if planned is not None else ())}
    if planned is not None and any(_is_update(span) for span in planned.lanes.get(COMPUTE, ())):
        names.add(UPDATE)
    first = [COMPUTE, ISSUE, WAITS, UPDATE]
    return [lane for lane in first if lane in names] + sorted(names - set(first))


def _spans(timeline: Timeline, lane: str) -> Sequence[Span]:
    """Return a lane's spans; updates that a plan runs between regions are drawn on the lane of updates."""
    if lane == COMPUTE:
        return [span for span in timeline.lanes.get(COMPUTE, ()) if not _is_update(span)]
    if lane == UPDATE:
        return [*timeline.lanes.get(UPDATE, ()), *(span for span in timeline.lanes.get(COMPUTE, ()) if _is_update(span))]
    return timeline.lanes.get(lane, ())


def _is_update(span: Span) -> bool:
    return span.name.startswith("update ")


def _busy(timeline: Timeline, lane: str) -> float:
    """Return the seconds of a step in which a lane is busy, with one transfer or several."""
    total, reached = 0.0, 0.0
    for span in sorted(_spans(timeline, lane), key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, timeline.seconds)
        total += max(0.0, end - start)
        reached = max(reached, end)
    return total


def _chart(measured: Timeline, planned: Timeline | None, scale: float) -> str:
    rows, y = [], 0
    for number, lane in enumerate(_lanes(measured, planned)):
        color = "#c03030" if lane == WAITS else COLORS[number % len(COLORS)]
        rows.append(f'<text x="0" y="{y + 15}">{html.escape(lane)}</text>')
        for timeline, kind in ((planned, "planned"), (measured, "measured")):
            if timeline is None or (kind == "planned" and lane in (WAITS, ISSUE)):
                continue
            rows.append(f'<g class="{kind}" opacity="{0.45 if kind == "planned" else 1}">')
            rows += bars(_spans(timeline, lane), timeline.seconds, scale, y, color)
            rows.append("</g>")
            y += ROW
        y += 4
    for timeline, dash in ((measured, ""), (planned, ' stroke-dasharray="4"')):
        if timeline is not None:
            x = LEFT + timeline.seconds * scale
            rows.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y}" stroke="#222"{dash}/>')
    legend = "" if planned is None else "<p>Of each lane the pale row above is the plan, the one below it the step as it ran.</p>"
    return f'{legend}<svg class="lanes" width="{LEFT + WIDTH + 10}" height="{y}">{"".join(rows)}</svg>'


def _table(rows: Sequence[LaneRow]) -> str:
    heads = ("lane", "busy s", "planned", "compute waited s", "planned")

    def cells() -> Iterator[str]:
        for row in rows:
            numbers = (row.busy, row.planned_busy, row.exposed, row.planned_exposed)
            texts = ("" if number is None else f"{number:.4f}" for number in numbers)
            yield "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in (row.lane, *texts)) + "</tr>"

    return "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>" + "".join(cells()) + "</table>"
