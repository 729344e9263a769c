"""The `zinf` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from .config import Config
from .dump import DumpError, Scheduled, load_target, pass_names, trace
from .errors import ZinfError
from .passes import joint_passes, pass_name
from .program import digest_of
from .targets import TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (2 for what the user can correct)."""
    options = _parser().parse_args(arguments)
    try:
        print(dump(options))
    except (DumpError, ZinfError) as error:
        print(f"zinf: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `zinf dump ... | head`
        sys.stderr.close()
    return 0


def dump(options: argparse.Namespace) -> str:
    """Return what `zinf dump` prints: the graphs, then the table."""
    found = trace(load_target(options.target), options=_json(options.options), world_size=options.world, after=options.after)
    joint = options.after in map(pass_name, joint_passes())
    wanted = "both" if joint else options.graph
    shown = [s for s in found if s.text and (wanted == "both" or (s.kind == "backward") == (wanted == "backward"))]
    titles = [s.name.replace("forward", "joint forward and backward") if joint else s.name for s in shown]
    parts = [f"# {title}, rank 0 of {options.world}\n{s.text}" for title, s in zip(titles, shown, strict=True)]
    return "\n".join([*parts, table(found), f"schedule hash: {schedule_hash(found):016x}"])


def table(found: Sequence[Scheduled]) -> str:
    """Return the account of all graphs, bytes moved per rank and step."""
    rows: list[list[Any]] = [[s.name, s.traffic.units, s.traffic.gathered, s.traffic.reduced, s.traffic.live] for s in found]
    rows.append(
        [
            "all",
            len({name for s in found for name in _unit_names(s)}),
            sum(s.traffic.gathered for s in found),
            sum(s.traffic.reduced for s in found),
            max((s.traffic.live for s in found), default=0),
        ]
    )
    headers = ["graph", "units", "bytes gathered", "bytes reduce-scattered", "largest live set"]
    return tabulate(rows, headers, intfmt=",")


def schedule_hash(found: Sequence[Scheduled]) -> int:
    """Hash the collective sequences of all graphs, in order: equal hashes, equal schedules."""
    return digest_of([line for s in found for line in s.program.sequence])


def _unit_names(scheduled: Scheduled) -> set[str]:
    return {slot.name for slot in scheduled.program.slots.values()}


def _json(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DumpError(f'--options is not JSON ({error}); accepted: an object such as \'{{"bucket": "8MiB"}}\'') from error
    if not isinstance(value, dict):
        raise DumpError(f'--options is a {type(value).__name__}; accepted: an object such as \'{{"bucket": "8MiB"}}\'')
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zinf", description="Look at what zinf-compile makes of a model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    dumping = commands.add_parser(
        "dump",
        help="print a model's schedule",
        description="Trace a model on fake tensors (no weight is allocated) and print its graphs with the inserted transfers, "
        "one operator a line, then what they move and hold.",
    )
    dumping.add_argument(
        "target", metavar="TARGET", help=f"MODULE:FUNCTION, returning (model, example inputs); or {', '.join(TARGETS)}"
    )
    dumping.add_argument("--options", metavar="JSON", help="the options of torch.compile, as JSON")
    dumping.add_argument("--graph", choices=["forward", "backward", "both"], default="both", help="default: both")
    dumping.add_argument("--after", metavar="PASS", help=f"show the graphs after this pass: {', '.join(pass_names(Config()))}")
    dumping.add_argument("--world", metavar="N", type=_world, default=1, help="as one of N ranks (default 1)")
    return parser


def _world(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; accepted: 1, 2, ...")
    return value
