"""Kept samples: some trained responses of every step, as text, for people.

One JSON object per line in `samples.jsonl`: prompt, response, reward and the group's rewards, and the values of the
response's tokens (`learner.metrics.sample_tokens`). The fields are named in docs/tracking.md. Per step the best, the
worst and others spread between are kept, so that a handful shows the range.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.learner.distributed.token_values import BatchTokens, TokenValues
from rollmesh.learner.metrics.sample_tokens import describe_tokens
from rollmesh.learner.metrics.trackers.interface import Sample
from rollmesh.learner.rollouts.group import SampledGroup, SampledMember
from rollmesh.mesh.config.run import LoggingSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory import payload_codec, reward_record
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollmesh.buffer.client.client import BufferClient

log = logging.getLogger(__name__)
Chosen = tuple[SampledGroup, SampledMember]


class SampleFetcher:
    """Fetches what is missing of the responses that will be kept.

    Where several ranks fetch theirs for themselves, these are the tokens. The records of rewards are fetched for these
    responses alone.

    Args:
        client: of the buffer, which has the payloads until the groups' checkpoint is committed.
        per_step: samples kept per step.
    """

    def __init__(self, client: BufferClient, per_step: int) -> None:
        self._client = client
        self._per_step = per_step

    async def fill(self, groups: Sequence[SampledGroup]) -> list[SampledGroup]:
        """The groups of a claimed batch, those responses with their trajectories; one that is gone is not kept."""
        chosen = _choose(groups, self._per_step)
        records = await self._records(chosen)
        found = await self._trajectories([each for each in chosen if each[1].trajectory is None])
        if not (records or found):
            return list(groups)

        def filled(group: SampledGroup, member: SampledMember) -> SampledMember:
            key = group.group_id, member.meta.member
            return replace(
                member,
                trajectory=found.get(key, member.trajectory),
                reward_record=records.get(key, member.reward_record),
            )

        return [replace(group, members=[filled(group, member) for member in group.members]) for group in groups]

    async def _trajectories(self, chosen: Sequence[Chosen]) -> dict[tuple[str, int], Trajectory]:
        if not chosen:
            return {}
        refs = [buffer_pb2.MemberRef(group_id=group.group_id, member=member.meta.member) for group, member in chosen]
        found: dict[tuple[str, int], Trajectory] = {}
        try:
            waiting = iter(chosen)
            async for payload in self._client.fetch(TRAIN, refs):
                group, member = next(waiting)
                trajectory = payload_codec.decode(payload, tokens=member.meta.response_tokens)
                found[group.group_id, member.meta.member] = trajectory
        except RollmeshError as error:
            log.warning("some samples are not kept: %s", error.message)
        return found

    async def _records(self, chosen: Sequence[Chosen]) -> dict[tuple[str, int], dict[str, Any]]:
        found: dict[tuple[str, int], dict[str, Any]] = {}

        async def fetch(group_id: str, member: int, entry: trajectory_pb2.SideData) -> None:
            try:
                data = await self._client.fetch_side(TRAIN, group_id, member, entry)
            except RollmeshError as error:
                log.warning("a sample is kept without its reward's evidence: %s", error.message)
            else:
                found[group_id, member] = reward_record.read_record(data)

        entries = ((group, member, reward_record.entry_of(member.meta)) for group, member in chosen)
        await run_together(
            *(fetch(group.group_id, member.meta.member, entry) for group, member, entry in entries if entry is not None)
        )
        return found


def _choose(groups: Sequence[SampledGroup], count: int) -> list[Chosen]:
    """The worst and the best response by reward, and others spread between."""
    scored = [(group, member) for group in groups for member in group.scored_members]
    if not scored or count == 0:
        return []
    scored.sort(key=lambda item: item[1].meta.reward)
    # Not by `np.unique`, which imports masked arrays: as long as a small model's first step.
    return [scored[index] for index in dict.fromkeys(np.linspace(0, len(scored) - 1, count).round().astype(int))]


@dataclass(frozen=True, slots=True, eq=False)
class ChosenSample:
    """A response that will be kept.

    Attributes:
        group, member: the response.
        trajectory: its tokens.
        values: of its trained tokens, on the host; see `BatchTokens.of`.
    """

    group: SampledGroup
    member: SampledMember
    trajectory: Trajectory
    values: TokenValues


class SampleLog:
    """Appends kept samples to a file.

    Args:
        path: the file.
        tokenizer: decodes responses; special tokens are left out, as for the reward.
        section: says how many samples are kept per step, and how many tokens of each with their values.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, section: LoggingSection) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._per_step = section.samples_per_step
        self._tokens = section.tokens_per_sample

    def choose(self, groups: Sequence[SampledGroup], tokens: BatchTokens | None) -> list[ChosenSample]:
        """Some samples of a step, with copies of their tokens' values; used by the training thread.

        Args:
            groups: the batch.
            tokens: values of its tokens; None: they are not known.
        """
        return [
            ChosenSample(
                group,
                member,
                member.trajectory,
                {} if tokens is None or not self._tokens else tokens.of(group.group_id, member.meta.member),
            )
            for group, member in _choose(groups, self._per_step)
            if member.trajectory is not None
        ]

    def append(
        self, step: int, chosen: Sequence[ChosenSample], staleness: Callable[[PolicyVersion], int]
    ) -> list[Sample]:
        """Appends the samples of a step, and returns them; used by the metrics writer's thread only.

        A full disk is reported, not raised.

        Args:
            step: that trained them.
            chosen: by `choose`.
            staleness: of a version, when they were trained.
        """
        samples = [self._sample(step, sample, staleness) for sample in chosen]
        if not samples:
            return samples
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        except OSError as error:
            log.warning("samples not kept: %s: %s", self._path, error.strerror)
        return samples

    def _sample(self, step: int, chosen: ChosenSample, staleness: Callable[[PolicyVersion], int]) -> Sample:
        group, member, trajectory = chosen.group, chosen.member.meta, chosen.trajectory
        text = self._decode(trajectory.response_ids.tolist())
        finish = trajectory_pb2.FinishReason.Name(member.finish_reason)
        sample = {
            "step": step,
            "group": group.group_id,
            "member": member.member,
            "prompt": group.leased.task.prompt_text,
            "response": text,
            "reward": member.reward,
            "components": dict(member.components),
            "members": [[other.meta.member, other.meta.reward if other.scored else None] for other in group.members],
            "ground_truth": json.loads(group.leased.task.ground_truth_json or "null"),
            "data_source": group.leased.task.data_source,
            "temperature": round(group.leased.task.sampling.temperature, 6),
            "versions": trajectory.versions.to_lists(),
            "finish_reason": finish.removeprefix("FINISH_REASON_").lower(),
            "generator": member.generator,
        }
        sample |= chosen.member.reward_record
        if self._tokens:
            sample["tokens"] = describe_tokens(
                trajectory, text, self._decode, chosen.values, staleness, most=self._tokens
            )
        return sample

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
