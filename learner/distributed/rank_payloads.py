"""The payloads of a process's shares of a plan: opened, checked, and their problems shared between the ranks.

Invariant: every rank learns which problem any of them has, so that all train, all drop the same groups, or all give up.
"""

from __future__ import annotations

from collections.abc import Collection

import msgpack
import numpy as np

from rollmesh.learner.batching.pack import check_sequence
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.prompt_images import PromptImageSource, read_prompts
from rollmesh.learner.distributed.routed_experts import ExpertSource, add_experts
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.trajectories import TrajectorySource
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.errors import DataError, PayloadError, StoreError, UnreachableError

Unusable = dict[str, str]
"""Groups that cannot be trained, and why."""


def gather_sequences(
    engines: Collection[Engine],
    plan: TrainPlan,
    payloads: TrajectorySource,
    vocabulary: int,
    experts: ExpertSource | None = None,
    images: PromptImageSource | None = None,
) -> tuple[dict[int, TrainSequence], Unusable]:
    """The sequences that this process's models compute, by their index in the plan; collective.

    Args:
        engines: of this process.
        plan: of the batch.
        payloads: of this process.
        vocabulary: token ids must be below it, for all models.
        experts: recorded by generators, of this process; None: they are not replayed.
        images: of this process; None: prompts are text alone.

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
        sequences, unusable = _decode(engines, plan, payloads, vocabulary, images)
        if experts is not None:
            sequences = add_experts(sequences, plan, experts)
    except (UnreachableError, StoreError) as error:
        unreachable = error
    world = next(iter(engines)).world
    problem = {"away": str(unreachable) if unreachable is not None else "", "unusable": unusable}
    everyone = [
        msgpack.unpackb(message)
        for message in world.gather_bytes(msgpack.packb(problem) if unreachable is not None or unusable else b"")
        if message
    ]
    for other in everyone:
        if other["away"]:
            raise unreachable or UnreachableError(f"another rank of the learner: {other['away']}")
    return sequences, {group: why for other in everyone for group, why in other["unusable"].items()}


def _decode(
    engines: Collection[Engine],
    plan: TrainPlan,
    payloads: TrajectorySource,
    vocabulary: int,
    images: PromptImageSource | None,
) -> tuple[dict[int, TrainSequence], Unusable]:
    own = sorted({member for engine in engines for member in plan.members_of(engine.layout)})
    members = [plan.members[index] for index in own]
    prompts = read_prompts(plan.prompts, {member.prompt for member in members}, images)
    sequences: dict[int, TrainSequence] = {}
    unusable: Unusable = {}
    for index, member, found in zip(own, members, payloads.get(members), strict=True):
        try:
            if isinstance(found, PayloadError | DataError):
                raise found
            prompt = prompts[member.prompt]
            if isinstance(prompt, PayloadError | DataError):
                raise prompt
            sequences[index] = TrainSequence(
                prompt_ids=prompt[0],
                response_ids=found.response_ids,
                response_mask=found.response_mask,
                behaviour_log_probs=found.log_probs,
                staleness=plan.lineage.per_token(found.versions, plan.version),
                temperature=plan.prompts[member.prompt].temperature,
                images=prompt[1],
                token_rewards=found.token_rewards,
            )
            check_sequence(index, sequences[index])
            _check_values(sequences[index], vocabulary)
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
    if sequence.token_rewards is not None and not np.isfinite(sequence.token_rewards).all():
        raise PayloadError("token_rewards", "not finite")
