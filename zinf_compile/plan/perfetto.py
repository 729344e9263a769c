"""A timeline as trace events, which ui.perfetto.dev and chrome://tracing draw: a track for each lane, a counter for each tier."""

from __future__ import annotations

from typing import Any

from .simulate import Timeline

MICRO = 1e6


def trace_events(timeline: Timeline, *, name: str = "plan", process: int = 1) -> list[dict[str, Any]]:
    """Return the events; times are in microseconds from the begin of the step, or of what began in the step before.

    Perfetto drops events of negative times.
    """
    begun = [span.start for spans in timeline.lanes.values() for span in spans]
    begun += [when for points in timeline.memory.values() for when, _ in points]
    first = min([0.0, *begun])
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
    for number, (lane, spans) in enumerate(timeline.lanes.items(), 1):
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": lane}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": process,
                "tid": number,
                "ts": (span.start - first) * MICRO,
                "dur": (span.end - span.start) * MICRO,
                "args": {"bytes": span.bytes},
            }
            for span in spans
        ]
    for tier, points in timeline.memory.items():
        events += [
            {"ph": "C", "name": f"bytes on {tier}", "pid": process, "ts": (when - first) * MICRO, "args": {"bytes": count}}
            for when, count in points
        ]
    return events
