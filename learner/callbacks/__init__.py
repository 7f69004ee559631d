"""Callbacks: users' code that hears of a run's events."""

from rollmesh.learner.callbacks.interface import (
    Callback,
    CommittedCheckpoint,
    EvaluationEnd,
    PublishedVersion,
    RunControl,
    RunEnd,
    RunStart,
    StepEnd,
)

__all__ = [
    "Callback",
    "CommittedCheckpoint",
    "EvaluationEnd",
    "PublishedVersion",
    "RunControl",
    "RunEnd",
    "RunStart",
    "StepEnd",
]
