"""What happens in a step, and the plan for it: where everything lives and when it moves. Values and pure functions: no FX, no
runtime, no live memory, so that all of it works on a laptop.

acted — The plan of a step whose graphs are each planned by themselves.
as_json — Frozen dataclasses as JSON and back, checked field by field.
both_graphs — A forward and its backward as one problem, and a plan of that as the plans of both graphs.
bound_gradients — The rows of the linear programme that say how gradients leave the device.
bound_programme — The linear programme behind `lower_bound`: intervals, rows, and what links can move in them.
bound_updates — Its rows for updates: what passes to pieces of states, until when, and in what room.
collector — Python's collector of cycles, seldom run while a plan is made.
compared_page — A step as it ran over the step as it was planned, on one page.
compute_memory — Memory of compute, as the plan counts it beside parameters: saved activations, and temporaries.
costs — What regions, links and updates cost, as measured.
critical_path — The chain of tasks that sets a step's length, in seconds.
fill_homes — Homes for one parameter after the other, by a check of memory.
fill_together — Homes of parameters together with what becomes of saved values.
formulas — Arithmetic of ZeRO and ZeRO-Infinity as sympy formulas.
graph_plan — Values that passes and the budget exchange: memory needs of a graph, and how far ahead it runs.
headroom — Memory left within the caps, and how a graph's transfers share it. `sharded/budget` calls `plan_graph`.
hold_back — Another rank's plan with less room: transfers start later, in the same order.
kept_units — Which full units stay gathered from a forward to its backward.
lower_bound — A bound below which no plan brings the seconds of a step: a linear programme.
memory_model — The one formula for memory: device and host bytes that the parameters of a graph take.
occupancy — Bytes that a plan takes on each tier, region by region.
on_paper — Tiers and links of a profile, what a step writes, what budgets fit.
page — The timelines of plans on one page, budgets one below the other.
perfetto — A timeline as trace events.
plan — A plan: homes, transfers, what is recomputed, and updates, each with the boundaries at which it starts and is due.
problem — What happens between two `optimizer.step()`: the problem that a plan solves.
problem_checks — What a problem must fulfil.
problem_parts — The rows that a problem consists of.
profile — Profiles of machines: rates, with their sources; `profiles/` has those of common ones.
recompute — Which saved values are dropped and made again in the backward, and what they are made from.
rates — Rates by which decisions are made before anything has run: of a machine's profile, measured on its device, or rough ones.
rough_links — Links and devices at rough rates, where nobody has measured.
saved_homes — Where the memory of saved values lives between forward and backward: a word's, or choices for a plan.
saved_schedule — When saved memory leaves and comes back, and for how long compute waits then.
simulate — Predicts a step that repeats: seconds on every lane, bytes on every tier at every moment.
shards_between — Which shards several ranks leave on their devices between a forward and its backward.
stretch — The problem of a deep model, made from that of a shallow one.
table — A plan as text: who lives where, and what happens at each boundary.
unroll — A plan, repeated for some steps, as tasks on lanes: a graph of what waits for what.
update_traffic — What one update of a piece of states moves over links, and holds in buffers.
verify — Whether a plan is legal, read from its rows alone.
verify_memory — The bytes of a plan at each moment, summed up for `verify` by itself.
verify_updates — Gradients and updates of a plan, for `verify`.
"""
