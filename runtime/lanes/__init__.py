"""Workers, one for each link, and meters of what they moved and who waited.

lanes — One lane per link: transfers on a lane run one after the other, beside compute and beside the other lanes.
link_meter — What crossed each link, how much at a time, and how long compute stood still for it; totals, and those of the
    last step.
overlap_log — How much of the time that transfers took compute went on, from what lanes and waits noted of themselves.
rank_lanes — The lanes of one rank, one for each link, and what is noted of the time for which compute waits for them.
wait_times — What a thread waits for, booked to the link that it is due to: who waits for a worker that waits itself waits
    for that.
"""
