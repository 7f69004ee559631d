"""Refusals of scripts, as errors that say what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.mesh.errors import ConfigError, FencedError, LostStateError, OldGenerationError, UnreachableError


def different_rules_error(table: str, differing: Sequence[Sequence[bytes]]) -> ConfigError:
    """The error of a front with a configuration for other rules than those in force."""
    names = ", ".join(
        f"{name.decode()} is {there.decode()} there, {here.decode()} here" for name, there, here in differing
    )
    return ConfigError(
        f"other fronts serve this run by other rules of table {table}: {names}",
        hint="start every front with the same configuration; to change it, stop them all first",
    )


def lost_state_error() -> LostStateError:
    """The error of a learner while acknowledged state may be lost."""
    return LostStateError(
        "Redis was restarted or restored, and may have lost acknowledged writes",
        hint="the learner automatically reports again which groups it has used; then the run continues",
    )


def unknown_incarnation_error() -> LostStateError:
    """The error of a learner with a takeover that Redis does not know."""
    return LostStateError(
        "Redis does not know this learner's incarnation: it was lost, or never existed",
        hint="a resumed learner automatically reports which groups it has used; other clients call Resume first",
    )


def checked_answer(answer: list[Any]) -> list[Any]:
    """Passes a script's answer on.

    Raises:
        RollmeshError: it is a refusal.
    """
    status = answer[0]
    if status == b"fenced":
        raise FencedError()
    if status == b"suspect":
        raise lost_state_error()
    if status == b"unknown_incarnation":
        raise unknown_incarnation_error()
    if status == b"old_generation":
        raise OldGenerationError("this connection generation is over", hint="join the mesh again")
    if status == b"replaced":
        raise UnreachableError("a newer stream of the same member is open", hint="use that one")
    return answer
