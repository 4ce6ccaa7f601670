"""Exact and near-exact schedules on a general graph with a fixed order, values computed again as often as it pays.

The oracle that shows what realizable plans leave on the table, and the problem of Checkmate and Moccasin.
"""

from rematplan.planner.schedule.graph import ScheduleGraph, parse
from rematplan.planner.schedule.joint import from_program
from rematplan.planner.schedule.referee import Replay, replay
from rematplan.planner.schedule.search import Schedule, Status, solve

__all__ = ["Replay", "Schedule", "ScheduleGraph", "Status", "from_program", "parse", "replay", "solve"]
