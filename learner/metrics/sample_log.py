"""Kept samples: some trained responses of every step, as text, for people.

One JSON object per line in `samples.jsonl`: step, group, member, prompt, response, reward, components, versions
(runs of [tokens, incarnation, version]), finish reason and ground truth. Per step the best, the worst and others
spread between are kept, so that a handful shows the range.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class SampleLog:
    """Appends kept samples to a file; used by the metrics writer's thread only.

    Args:
        path: the file.
        tokenizer: decodes responses; special tokens are left out, as for the reward.
        per_step: samples kept per step.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, per_step: int) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._per_step = per_step

    def append(self, step: int, groups: Sequence[SampledGroup]) -> None:
        """Appends some of a step's samples; a full disk is reported, not raised."""
        candidates = [
            (group, member.meta, member.trajectory)
            for group in groups
            for member in group.members
            if member.trajectory is not None
        ]
        if not candidates or self._per_step == 0:
            return
        candidates.sort(key=lambda item: item[1].reward)
        chosen = np.unique(np.linspace(0, len(candidates) - 1, self._per_step).round().astype(int))
        lines = [self._line(step, *candidates[index]) for index in chosen]
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            _log.warning("samples not kept: %s: %s", self._path, error.strerror)

    def _line(self, step: int, group: SampledGroup, member: trajectory_pb2.MemberMeta, trajectory: Trajectory) -> str:
        finish = trajectory_pb2.FinishReason.Name(member.finish_reason)
        entry = {
            "step": step,
            "group": group.group_id,
            "member": member.member,
            "prompt": group.leased.task.prompt_text,
            "response": self._tokenizer.decode(trajectory.response_ids.tolist(), skip_special_tokens=True),
            "reward": member.reward,
            "components": dict(member.components),
            "ground_truth": json.loads(group.leased.task.ground_truth_json or "null"),
            "data_source": group.leased.task.data_source,
            "versions": trajectory.versions.to_lists(),
            "finish_reason": finish.removeprefix("FINISH_REASON_").lower(),
            "generator": member.generator,
        }
        return json.dumps(entry, ensure_ascii=False) + "\n"
