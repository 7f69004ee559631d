"""All probes in their order: each builds on what earlier ones have found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.conformance.probes import answers, identity, known_answers, load, reaching, streaming
from rollmesh.reward_service.conformance.probes.restarting import KILL
from rollmesh.reward_service.conformance.session import Session

Probe = Callable[[Session], Awaitable[None]]

FOUNDATIONS = (identity.REPEAT, load.SINGLE)
"""Probes that others build on."""

_ALWAYS = ("reach.connection", "reach.info", "answers.samples", KILL)

PROBES: Sequence[tuple[str, Probe]] = (
    (identity.REPEAT, identity.repeat),
    (identity.RANDOM, identity.random_scores),
    (identity.SAME_ID, identity.same_id),
    (identity.EQUAL, identity.equal_content),
    (identity.ALONE, identity.alone),
    (identity.MEAN, identity.group_mean),
    (answers.ODD, answers.odd),
    (answers.TRUTH, answers.unreadable_truth),
    (answers.FIELDS, answers.all_fields),
    (answers.IDS, answers.wants_ids),
    (answers.BATCH, answers.big_batch),
    (known_answers.PACK, known_answers.known_answers),
    (load.SINGLE, load.single),
    (load.PARALLEL, load.parallel),
    (load.DEADLINE, load.deadline),
    (load.CANCEL, load.cancel),
    (streaming.ANSWERS, streaming.answers),
    (streaming.EARLY, streaming.early),
    (streaming.SLOW, streaming.slow_item),
    (streaming.CANCEL, streaming.cancel),
    (streaming.TIMEOUT, streaming.timeout),
    (streaming.VANISH, streaming.vanish),
    (load.RATES, load.rates),
    (load.STORM, load.storm),
    (load.LARGE, load.large),
)


def is_chosen(probe: str, only: Sequence[str]) -> bool:
    """True if a probe is to be run."""
    return not only or any(probe.startswith(prefix) for prefix in only)


def refuse_unknown(only: Sequence[str]) -> None:
    """Refuses a prefix that chooses nothing: a check without its probes would pass.

    Raises:
        ConfigError: no probe's id begins with a prefix.
    """
    ids = (*_ALWAYS, reaching.HEALTH, reaching.KEY, *(probe for probe, _ in PROBES))
    for prefix in only:
        if not any(probe.startswith(prefix) for probe in ids):
            families = sorted({probe.partition(".")[0] for probe in ids})
            raise ConfigError(
                f"no probe has an id that begins with {prefix!r}", hint=f"there are {', '.join(families)}"
            )
