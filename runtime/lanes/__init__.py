"""Workers, one for each link, and meters of what they moved and who waited.

lanes — One lane per link: transfers on a lane run one after the other, beside compute and beside the other lanes.
link_meter — Bytes, peaks and waiting time of each link, in total and of the last step.
overlap_log — The part of the time of transfers during which compute went on, from logs that lanes and waits keep.
rank_lanes — The lanes of one rank, one for each link, and its meter.
step_recorder — Records one step as it runs: compute, transfers, updates and waits, and memory over time.
stream_lane — A lane of an accelerator: transfers are issued to a stream, and whoever needs them waits for an event.
wait_times — Attributes waiting time to links.
"""
