"""The `torch.compile` backend: capture, passes, and the callable that runs a graph. It calls every other folder; only the
command line calls it.

bind — Binds the arguments of one call to the units of the graph's parameter slots; partitions parameters at their first
    call.
budgets_by_tiles — Budgets of one captured graph under other caps: those whose default tiles cut its parameters alike need
    as much.
capture — Reads a Dynamo graph's inputs: slots for parameters, names for buffers, errors for models that can't be
    partitioned.
choices — Choices that all ranks make alike, once per parameter, from sizes that they exchange; later graphs reuse them.
compiled_together — Whether all ranks compile a graph at the same point.
decide_memory — Decides where everything of one captured graph lives: states of its parameters, and values that it saves.
double_backward — Rejects double backward, which AOTAutograd doesn't support for compiled graphs, with an error that says
    what to do.
entry — The torch.compile backend, which Dynamo calls for each captured graph.
fork_pool — Runs jobs in forked worker processes, for their effects on disk, such as filling Inductor's cache.
graph_compiler — Compiles one captured graph: capture, passes, lowering, and the callable that runs the program.
home_planner — Decides the homes of the parameters of one captured graph, once its forward and backward are known, from the
    caps.
keep_units — Decides which full units stay gathered from a forward to its backward.
kept_graphs — Graphs kept as they were before their plan, and programs that can be replaced.
losses — How losses of one captured graph are computed: settings of the passes that chunk them.
measured_costs — Costs of regions, links and updates from records of steps.
placement_of_inputs — Placement of a graph whose parameters are partitioned already: theirs, in the place of the options'
    defaults.
ordinary_graph — Graphs whose parameters stay ordinary ones, because nothing would move.
plan_graphs — Plans for the transfers of one graph, by the planner that option `planner` names.
planned_step — The problem and the plan of a step that was recorded.
remake — What can be dropped and made again in a backward; both graphs are given what a share of that takes.
regions — Compiles regions through Inductor: each distinct structure once, several in parallel.
replan — Plans made anew from measured costs, between two steps.
replan_pairs — Plans made again for a forward and its backward as one, so that units may stay from one to the other.
room_of_all — The room that all ranks have for a graph they plan together, region by region.
run_graph — The callable that AOTAutograd runs in the place of one scheduled graph.
saved_choices — What may become of saved values where a share of the blocks runs again: choices that `decide_memory` weighs.
saved_values — Space on drives for the values that a graph saves there.
states_kept — What the optimizers of this process keep for each parameter.
static_shapes — Specialises a graph that Dynamo captured with dynamic sizes to the sizes of this call.
step_account — What a step of one captured graph takes at rough rates, for the decisions about it.
tell_homes — What was decided for the parameters of a graph, as text.
through_dynamo — Errors of this package as Dynamo raises them to the user: as they are, without its frames.
tiles_of_inputs — Tiles of a graph's parameters: whether they follow from the cap, and smaller ones, where the graph doesn't fit
    with those.
wrappers — Refusal of models in data-parallel wrappers.
"""

from typing import Any

from zinf_compile.optim.eager_models import watch_steps

from . import entry


def __getattr__(name: str) -> Any:
    """Return the backend, which `torch.compile` asks for once, by the name in the package's entry points."""
    if name == "zero_infinity":
        watch_steps()
        return entry.zero_infinity
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
