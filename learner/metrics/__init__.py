"""Metrics of a run: records per step, trackers that take them, totals for the summary."""

from rollmesh.learner.metrics.trackers.interface import Record, Tracker
from rollmesh.learner.metrics.trackers.opening import open_trackers
from rollmesh.learner.metrics.writer import MetricsWriter

__all__ = ["MetricsWriter", "Record", "Tracker", "open_trackers"]
