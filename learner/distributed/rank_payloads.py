"""The payloads of a rank's share of a plan: opened, checked, and their problems shared between the ranks.

Invariant: every rank learns which problem any of them has, so that all train, all drop the same groups, or all give up.
"""

from __future__ import annotations

import msgpack
import numpy as np

from rollmesh.learner.batching.pack import check_sequence
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.trajectories import TrajectorySource
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.errors import DataError, PayloadError, StoreError, UnreachableError

Unusable = dict[str, str]
"""Groups that cannot be trained, and why."""


def gather_sequences(
    engine: Engine, plan: TrainPlan, payloads: TrajectorySource
) -> tuple[dict[int, TrainSequence], Unusable]:
    """This rank's sequences by their index in the plan; collective.

    Args:
        engine: knows the ranks, and the model's vocabulary.
        plan: of the batch.
        payloads: of this rank.

    Returns:
        The sequences, and the groups that any rank has found unusable.

    Raises:
        UnreachableError: the buffer stayed away, from this rank or another.
        StoreError: likewise, Redis.
    """
    unreachable: UnreachableError | StoreError | None = None
    sequences: dict[int, TrainSequence] = {}
    unusable: Unusable = {}
    try:
        sequences, unusable = _decode(engine, plan, payloads)
    except (UnreachableError, StoreError) as error:
        unreachable = error
    problem = {"away": str(unreachable) if unreachable is not None else "", "unusable": unusable}
    everyone = [
        msgpack.unpackb(message)
        for message in engine.gather_bytes(msgpack.packb(problem) if unreachable is not None or unusable else b"")
        if message
    ]
    for other in everyone:
        if other["away"]:
            raise unreachable or UnreachableError(f"another rank of the learner: {other['away']}")
    return sequences, {group: why for other in everyone for group, why in other["unusable"].items()}


def _decode(engine: Engine, plan: TrainPlan, payloads: TrajectorySource) -> tuple[dict[int, TrainSequence], Unusable]:
    own = sorted({i for minibatch in plan.division.minibatches for micro in minibatch[engine.rank] for i in micro})
    members = [plan.members[index] for index in own]
    prompts = [prompt.array() for prompt in plan.prompts]
    sequences: dict[int, TrainSequence] = {}
    unusable: Unusable = {}
    for index, member, found in zip(own, members, payloads.get(members), strict=True):
        try:
            if isinstance(found, PayloadError | DataError):
                raise found
            sequences[index] = TrainSequence(
                prompt_ids=prompts[member.prompt],
                response_ids=found.response_ids,
                response_mask=found.response_mask,
                behaviour_log_probs=found.log_probs,
                staleness=plan.lineage.per_token(found.versions, plan.version),
                temperature=plan.prompts[member.prompt].temperature,
            )
            check_sequence(index, sequences[index])
            _check_values(sequences[index], engine.vocab_size)
        except (PayloadError, DataError) as error:
            unusable.setdefault(member.group_id, f"member {member.member}: {error}")
    return sequences, unusable


def _check_values(sequence: TrainSequence, vocab_size: int) -> None:
    """Refuses values that would end a step, or make its gradient infinite.

    Raises:
        PayloadError: names the field.
    """
    ids = sequence.response_ids
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise PayloadError("response_ids", f"{ids.min()} to {ids.max()}, but the model has {vocab_size} tokens")
    if not np.isfinite(sequence.behaviour_log_probs[sequence.response_mask != 0]).all():
        raise PayloadError("log_probs", "not finite")
