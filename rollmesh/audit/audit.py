"""The audit of a run's rewards: all looks, in one diagnosis.

An audit finds signs, and proves nothing. Each finding says its numbers, and where it can, a sample to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollmesh.audit.components import compare_with, look_at_components
from rollmesh.audit.evidence import Kept, RunEvidence
from rollmesh.audit.jumps import look_at_jumps, look_at_length
from rollmesh.audit.rewards import (
    look_at_distribution,
    look_at_held_out,
    look_at_judge,
    look_at_saturation,
    look_at_unscored,
)
from rollmesh.audit.texts import look_at_phrases, look_at_repeats, look_at_truth
from rollmesh.doctor.findings import Diagnosis, Finding, Severity, note
from rollmesh.mesh.config.models import Config
from rollmesh.reward_service.judge.spent import read_spent
from rollmesh.reward_service.samples import SampleRow
from rollmesh.reward_service.trying.chosen import chosen_scorer
from rollmesh.reward_service.trying.trial import try_rows
from rollmesh.reward_service.trying.tried import Tried
from rollmesh.run_files import read_config

CHECK = "audit"
_FEW = 50
_LOOKS: Sequence[Callable[[RunEvidence], Iterator[Finding]]] = (
    look_at_saturation,
    look_at_phrases,
    look_at_repeats,
    look_at_truth,
    look_at_length,
    look_at_jumps,
    look_at_components,
    look_at_held_out,
)


def audit_run(folder: Path, *, against: str | None = None) -> Diagnosis:
    """Audits a run, also one in progress.

    Args:
        folder: of the run.
        against: a function or `grpc://host:port` that scores the kept samples too.

    Raises:
        DataError: it is not the folder of `rollmesh run`, or has no samples.
        RewardError: the second scorer does not exist.
    """
    run, config = RunEvidence.read(folder), read_config(folder)
    found = [*look_at_judge(read_spent(folder), config.reward.judge), *audit(run)]
    if against is not None:
        tried = asyncio.run(_score(run.samples, config, against))
        found += compare_with(run.samples, tried, against)
    return Diagnosis(str(folder), [*found, *_conclusion(run, found)])


def audit(run: RunEvidence) -> Iterator[Finding]:
    """All looks at a run, but for a second scorer's."""
    yield from look_at_distribution(run)
    yield from look_at_unscored(run)
    if len(run.samples) < _FEW:
        yield note(
            CHECK,
            f"{len(run.samples)} kept samples: too few to judge",
            "logging.samples_per_step=16 keeps more of each step",
        )
        return
    for look in _LOOKS:
        yield from look(run)


def _conclusion(run: RunEvidence, found: Sequence[Finding]) -> Iterator[Finding]:
    if len(run.samples) < _FEW or any(finding.severity in (Severity.WARNING, Severity.PROBLEM) for finding in found):
        return
    looked = dict.fromkeys(finding.check for finding in found if finding.severity is Severity.OK)
    responses = f" (of {run.unscored.members} trained responses)" if run.unscored.members else ""
    yield note(
        CHECK,
        f"nothing suspicious in {len(run.samples)} kept samples of {len({s.step for s in run.samples})} steps"
        f"{responses}, "
        f"{len(run.steps)} records and {len(run.evaluations)} held-out rounds, as far as there was enough to look at: "
        f"{', '.join(looked)}. Samples that were not kept were not looked at",
    )


async def _score(samples: Sequence[Kept], config: Config, against: str) -> list[Tried]:
    is_endpoint = "://" in against
    scorer = chosen_scorer(
        config, functions=() if is_endpoint else (against,), endpoint=against if is_endpoint else None
    )
    rows = (
        SampleRow(
            name=f"step {s.step}, group {s.group}",
            data_source=s.source,
            prompt=s.prompt,
            ground_truth=s.ground_truth,
            responses=(s.response,),
            members=(str(s.member),),
            recorded=(None,),
            step=s.step,
        )
        for s in samples
    )
    try:
        await scorer.start()
        return [tried async for tried in try_rows(scorer, rows)]
    finally:
        await scorer.close()
