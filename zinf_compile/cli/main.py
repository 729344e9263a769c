"""The `zinf` command: parses arguments, runs a subcommand, prints the dump of a schedule."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from zinf_compile.backend.ordinary_graph import OF_COMPUTE
from zinf_compile.backend.through_dynamo import without_how_to_report
from zinf_compile.config import Config
from zinf_compile.errors import ZinfError
from zinf_compile.ir.program import digest_of
from zinf_compile.passes import joint_passes, pass_name
from zinf_compile.passes.analysis.traffic import Traffic
from zinf_compile.passes.analysis.transfer_graph import COMPUTE, find_critical_path, transfer_dot

from . import bench_io, consolidate, doctor, inspect_checkpoint, plan
from .colors import colored
from .dump_error import DumpError
from .models import TARGETS
from .output_files import print_output
from .target import NAMED, load_target
from .timed_transfers import time_transfers
from .trace import DEVICES, Scheduled, nothing_compiled, pass_names, trace

_LINKS = {
    "gathered": "gathered",
    "reduced": "reduce-scattered",
    "read": "read",
    "copied_in": "copied in",
    "copied_out": "copied out",
    "written": "written",
}
_BETWEEN_RANKS = ("gathered", "reduced")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where what was checked failed, 2 for errors that the user can correct."""
    options = _parser().parse_args(arguments)
    try:
        print_output(options.run(options))
    except (DumpError, ZinfError) as error:
        print(f"zinf: {without_how_to_report(str(error))}", file=sys.stderr)
        return 2
    return int(getattr(options, "status", 0))


_NOTHING_MOVES = (
    "a run on one rank with these options leaves the parameters as they are, and has none of these transfers; "
    'one with {"params": "device"} has them'
)


def dump(options: argparse.Namespace) -> str:
    """Return the output of `zinf dump`: the graphs and the table, or the selected alternative."""
    for name in ("after", "diff", "hash", "ops"):
        if getattr(options, name) and options.format != "text":
            raise DumpError(f"--{name} and --format {options.format} exclude each other; accepted: --format text")
    given, around = _json(options.options), options.after or options.diff
    target = load_target(options.target)
    found = trace(target, options=given, world_size=options.world, device=options.device, after=around)
    if not found:
        raise nothing_compiled(options.target)
    if options.machine is not None:
        time_transfers(found, options.machine, world=options.world)
    if options.hash:
        return f"{schedule_hash(found):016x}"
    joint = around in map(pass_name, joint_passes())
    shown = [s for s in found if joint or options.graph == "both" or (s.kind == "backward") == (options.graph == "backward")]
    if options.format == "dot":
        return transfer_dot([(f"{s.name}, rank 0 of {options.world}", s.transfers) for s in shown])
    if options.format == "json":
        return json.dumps(report(found, shown, options=given, world_size=options.world, device=options.device), indent=2)
    seen = [s for s in shown if s.text]
    titles = [s.name.replace("forward", "joint forward and backward") if joint else s.name for s in seen]
    if options.diff:
        parts = [_difference(s, title, options.diff) for s, title in zip(seen, titles, strict=True)]
        return "\n".join(parts) or f"# no graph goes through {options.diff}"
    whole = options.ops or options.after  # a pass is shown by its operators
    texts = [s.text if whole else s.summary for s in seen]
    parts = [f"# {title}, rank 0 of {options.world}\n{text}" for text, title in zip(texts, titles, strict=True)]
    if not options.after:
        parts = [f"{part}{s.plan and chr(10)}{s.plan}" for part, s in zip(parts, seen, strict=True)]
    notes = list(dict.fromkeys(s.shape.text() for s in found if s.shape is not None))
    if options.world == 1 and OF_COMPUTE.issuperset(given or ()):
        notes.append(_NOTHING_MOVES)
    return "\n".join([*map(colored, parts), table(found), *notes, f"schedule hash: {schedule_hash(found):016x}"])


def table(found: Sequence[Scheduled]) -> str:
    """Return the table of all graphs: bytes moved per rank by each run; links without traffic are omitted."""
    total = _total(found)
    links = {link: title for link, title in _LINKS.items() if link in _BETWEEN_RANKS or getattr(total, link)}

    def row(name: str, traffic: Traffic, path: int) -> list[Any]:
        return [name, traffic.units, *(getattr(traffic, link) for link in links), traffic.live, path]

    rows = [row(s.name, s.traffic, _critical(s)["bytes"]) for s in found]
    rows.append(row("all", total, sum(path for *_, path in rows)))
    headers = ["graph", "units", *(f"bytes {title}" for title in links.values()), "largest live set", "critical path"]
    if found and _is_timed(found[0]):
        seconds = [sum(_critical_seconds(s).values()) for s in found]
        rows = [[*row, f"{each:.3g}"] for row, each in zip(rows, [*seconds, sum(seconds)], strict=True)]
        headers.append("critical path s")
    return tabulate(rows, headers, intfmt=",")


def report(
    found: Sequence[Scheduled], shown: Sequence[Scheduled], *, options: Mapping[str, Any], world_size: int, device: str
) -> dict[str, Any]:
    """Return the content of `--format json`: the totals of all graphs found, and each graph shown.

    Keys are added in later versions, never renamed. All bytes are those of one rank when each graph runs once, without the
    optimizer's transfers.

        schedule_hash   16 hexadecimal digits; equal on two machines if all graphs have the same collectives in the same order
        world           number of ranks
        device          cpu, where the device is host memory, or cuda, which has memory of its own
        compute_shape   the values that decide bits, beside the model and its types; where graphs differ, of the first one:
                        bucket_bytes, tile_bytes, piece_numel, chunk_bytes, worth_bytes, chunk_loss, compute, mode; token_tile
                        where it is set
        options         the options in force, as they are written for torch.compile; defaults included
        traffic         of all graphs: units; by link gathered and reduced (between ranks), read (from a drive, to the host or to
                        a device that is host memory), copied_in (host to device), copied_out (device to host), written (to a
                        drive); live (the peak of full units, in bytes)
        graphs          in order of compilation; of each:
            name, kind      forward, backward or inference
            collectives     in order; of each: operator (all_gather or reduce_scatter), group (those of one operator and group are
                            issued as one; -1: no group), unit (the parameter's name), dtype (in which it moves), bytes (of the
                            full unit in that type), moved (per rank)
            swaps           in order; of each: operator (swap_in or swap_out), from and to (device, host or nvme), unit, moved
                            (the bytes of this rank's shard)
            traffic         as above
            saved           of a forward and its backward: the bytes that the forward saves, by what becomes of them (keep,
                            host, nvme)
            critical_path   bytes; moved (those of them that are transfers); nodes, in order, each with its name in the text
                            (a region of compute has that of its first operator), lane (compute, gather, reduce, read, copy in,
                            copy out or write) and bytes; with --machine also seconds by lane, of the path that takes longest
    """
    config = Config.from_options(options, check_folders=False)
    in_force = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        "schedule_hash": f"{schedule_hash(found):016x}",
        "world": world_size,
        "device": device,
        "compute_shape": (next((s.shape for s in found if s.shape is not None), None) or config.shape()).values(),
        "options": {name: value for name, value in in_force.items() if value is not None},
        "traffic": dataclasses.asdict(_total(found)),
        "graphs": [
            {
                "name": s.name,
                "kind": s.kind,
                "collectives": [
                    {
                        "operator": c.operator,
                        "group": c.group,
                        "unit": c.unit.name,
                        "dtype": str(c.dtype).removeprefix("torch."),
                        "bytes": c.bytes,
                        "moved": c.moved,
                    }
                    for c in s.collectives
                ],
                "swaps": [
                    {"operator": w.operator, "from": w.src, "to": w.dst, "unit": w.unit.name, "moved": w.moved} for w in s.swaps
                ],
                "traffic": dataclasses.asdict(s.traffic),
                "saved": s.saved,
                "critical_path": _critical(s),
            }
            for s in shown
        ],
    }


def schedule_hash(found: Sequence[Scheduled]) -> int:
    """Hash the collective sequences of all graphs, in order: equal hashes, equal collectives."""
    return digest_of([line for s in found for line in s.program.sequence])


def _difference(scheduled: Scheduled, title: str, changed_by: str) -> str:
    before, after = scheduled.before.splitlines(keepends=True), scheduled.text.splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, f"{title} before {changed_by}", f"{title} after {changed_by}")
    return "".join(lines) or f"# {title}: unchanged by {changed_by}\n"


def _total(found: Sequence[Scheduled]) -> Traffic:
    return Traffic(
        units=len({slot.name for s in found for slot in s.program.slots.values()}),
        **{link: sum(getattr(s.traffic, link) for s in found) for link in _LINKS},
        live=max((s.traffic.live for s in found), default=0),
    )


def _critical(scheduled: Scheduled) -> dict[str, Any]:
    facts = scheduled.transfers.nodes
    nodes = [{"name": n, "lane": facts[n]["lane"], "bytes": facts[n]["bytes"]} for n in find_critical_path(scheduled.transfers)]
    moved = sum(node["bytes"] for node in nodes if node["lane"] != COMPUTE)
    timed = {"seconds": _critical_seconds(scheduled)} if _is_timed(scheduled) else {}
    return {**timed, "bytes": sum(node["bytes"] for node in nodes), "moved": moved, "nodes": nodes}


def _is_timed(scheduled: Scheduled) -> bool:
    return all("seconds" in facts for facts in scheduled.transfers.nodes.values())


def _critical_seconds(scheduled: Scheduled) -> dict[str, float]:
    """Return the seconds of the critical path by lane."""
    found: dict[str, float] = {}
    for node in find_critical_path(scheduled.transfers, weight="seconds"):
        facts = scheduled.transfers.nodes[node]
        found[facts["lane"]] = found.get(facts["lane"], 0.0) + facts["seconds"]
    return found


def _json(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DumpError(f'--options is not JSON ({error}); accepted: an object such as \'{{"bucket": "8MiB"}}\'') from error
    if not isinstance(value, dict):
        raise DumpError(f'--options is a {type(value).__name__}; accepted: an object such as \'{{"bucket": "8MiB"}}\'')
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zinf", description="Inspect the schedules and checkpoints of zinf-compile, and this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    dumping = commands.add_parser(
        "dump",
        help="print a model's schedule",
        description="Trace a model on fake tensors (no weight is allocated) and print its graphs: a line for each transfer, "
        "one for the compute between two, and blocks of equal structure once; then a table of the bytes that they move and hold.",
    )
    dumping.add_argument("target", metavar="TARGET", help=f"{NAMED}, returning (model, example inputs); or {', '.join(TARGETS)}")
    dumping.add_argument("--options", metavar="JSON", help="the options of torch.compile, as JSON")
    dumping.add_argument("--graph", choices=["forward", "backward", "both"], default="both", help="default: both")
    dumping.add_argument("--format", choices=["text", "dot", "json"], default="text", help="default: text")
    dumping.add_argument("--ops", action="store_true", help="print every operator of every block, one a line")
    known = ", ".join(pass_names(Config()))
    instead = dumping.add_mutually_exclusive_group()
    instead.add_argument("--after", metavar="PASS", help=f"show the graphs after this pass, with every operator: {known}")
    instead.add_argument("--diff", metavar="PASS", help="print what this pass changed in each graph, and nothing else")
    instead.add_argument("--hash", action="store_true", help="print the hash of the collectives of all graphs, and nothing else")
    dumping.add_argument("--world", metavar="N", type=plan.count, default=1, help="as one of N ranks (default 1)")
    dumping.add_argument(
        "--device",
        choices=DEVICES,
        default=DEVICES[0],
        help="show the schedule for a device that is host memory (cpu, the default) or has memory of its own (cuda); "
        "needs none, and the operators shown stay the CPU's",
    )
    dumping.add_argument(
        "--machine", metavar="NAME", help="a profile, as of `zinf plan`, or `here`: gives the critical path in seconds, too"
    )
    dumping.set_defaults(run=dump)
    plan.add_parser(commands)
    doctor.add_parser(commands)
    bench_io.add_parser(commands)
    inspect_checkpoint.add_parser(commands)
    consolidate.add_parser(commands)
    return parser
