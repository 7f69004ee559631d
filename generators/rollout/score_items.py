"""Finished members as items to score: their origin, their texts, and what is made only for those who want it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.generators.engines.types import GenerationResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.mesh.trajectory.content_key import content_key
from rollmesh.mesh.trajectory.image_files import IMAGES_NAME
from rollmesh.mesh.trajectory.token_ends import placed_ends
from rollmesh.protos import reward_pb2

# Most bytes of a turn in a message besides its characters: its length, and characters that it cuts.
_TURN_BYTES = 24
TURN = "turn"
"""Kind of the span of an episode's last turn."""


class ResponseText(Protocol):
    """The part of `TokenizerCodec` that items need."""

    def decode(self, responses: Sequence[NDArray[np.int32]]) -> list[str]:
        """Texts of several responses, special tokens left out."""
        ...

    def token_ends(self, ids: NDArray[np.int32], text: str) -> list[int]:
        """For each token the characters of the text up to its end; see `mesh.trajectory.token_ends`."""
        ...


class ScoredMember:
    """A finished member and its item; `ItemDetails` for servers that want more.

    Args:
        decoded: text of the whole response.

    Attributes:
        item: without what is made only where it is wanted.
    """

    def __init__(
        self, run: str, group: ActiveGroup, finished: FinishedMember, text: ResponseText, decoded: str
    ) -> None:
        self.group = group
        self.finished = finished
        self._text = text
        self._task = group.grant.task
        self._decoded = decoded
        self._places = finished.result.sampled.turns
        self._turn_ends: dict[int, Sequence[int]] = {}
        result = finished.result
        final = result.final_text if isinstance(result, EpisodeResult) else None
        # An agent may answer with other words than those of its last turn.
        self._last_turn = result.sampled.last_turn if final is not None else result.sampled.response_ids
        self._response = decoded if final is None else final
        self._is_last_turn = final is None or text.decode([self._last_turn]) == [final]
        self.item = self._item(run, result)

    def messages_json(self) -> str:
        """See `ItemDetails`."""
        return self._messages_json

    def token_ends(self) -> Sequence[int]:
        """See `ItemDetails`."""
        return self._token_ends

    def images(self) -> Sequence[bytes]:
        """See `ItemDetails`."""
        return self.group.images

    def turns(self) -> Sequence[str]:
        """See `ItemDetails`."""
        return self._turns

    def most_turns_bytes(self) -> int:
        """See `ItemDetails`."""
        return len(self._decoded.encode()) + _TURN_BYTES * len(self._places)

    def turn_ends(self, turn: int) -> Sequence[int]:
        """For each token of a turn, from 1, the characters of the turn's text up to its end; may take a while."""
        if turn not in self._turn_ends:
            begin, end = self._places[turn - 1]
            ids = self.finished.result.sampled.response_ids[begin:end]
            self._turn_ends[turn] = self._text.token_ends(ids, self._turns[turn - 1])
        return self._turn_ends[turn]

    @cached_property
    def _turns(self) -> list[str]:
        ids = self.finished.result.sampled.response_ids
        return self._text.decode([ids[begin:end] for begin, end in self._places])

    @cached_property
    def _messages_json(self) -> str:
        result = self.finished.result
        messages: Sequence[Mapping[str, Any]] = result.messages if isinstance(result, EpisodeResult) else ()
        if not messages:
            messages = [*self._prompt_messages(), {"role": "assistant", "content": self._response}]
        return json.dumps(list(messages), default=str)

    @cached_property
    def _token_ends(self) -> list[int]:
        tokens = len(self.finished.result.sampled)
        ends = self._text.token_ends(self._last_turn, self._response) if self._is_last_turn else []
        begin = tokens - len(self._last_turn)
        return placed_ends(ends, self._response, tokens=tokens, begin=begin, whole=self._is_last_turn)

    def _prompt_messages(self) -> Sequence[Mapping[str, Any]]:
        for text, key in ((self._task.messages_json, None), (self._task.extra_info_json, "prompt_messages")):
            try:
                found = json.loads(text or "null")
            except ValueError:
                continue
            found = found.get(key) if key is not None and isinstance(found, dict) else found
            if isinstance(found, list) and found:
                return found
        return [{"role": "user", "content": self._task.prompt_text}]

    def _item(self, run: str, result: GenerationResult) -> reward_pb2.ScoreItem:
        task, group = self._task, self.group
        name = f"{group.group_id}/{group.grant.attempt}/{self.finished.member}"
        extra_info = task.extra_info_json
        if isinstance(result, EpisodeResult):
            extra_info = _extra_info(extra_info, result)
        item = reward_pb2.ScoreItem(
            item_id=name,
            group_id=group.group_id,
            data_source=task.data_source,
            prompt=task.prompt_text,
            response=self._response,
            ground_truth_json=task.ground_truth_json,
            extra_info_json=extra_info,
            response_ids=result.sampled.response_ids.tolist(),
            run=run,
            trajectory_id=name,
            attempt=group.grant.attempt,
            policy_version=result.sampled.versions.newest.version,
            finish_reason=result.finish_reason,
            images=_images(group),
            turn_count=len(self._places),
        )
        if isinstance(result, EpisodeResult) and self._is_last_turn and self._response:
            item.spans.add(begin=0, end=len(self._response), kind=TURN)
        item.content_key = content_key(item)
        return item


def scored_members(
    run: str, members: Sequence[tuple[ActiveGroup, FinishedMember]], text: ResponseText
) -> list[ScoredMember]:
    """Members with their items; long responses take seconds to decode."""
    decoded = text.decode([finished.result.sampled.response_ids for _, finished in members])
    return [
        ScoredMember(run, group, finished, text, own) for (group, finished), own in zip(members, decoded, strict=True)
    ]


def _images(group: ActiveGroup) -> list[reward_pb2.ImageReference]:
    digests = list(group.grant.task.image_digests) or [""] * len(group.images)
    return [
        reward_pb2.ImageReference(
            uri=f"{IMAGES_NAME}/{digest[:2]}/{digest}" if digest else "", sha256=hashlib.sha256(image).digest()
        )
        for digest, image in zip(digests, group.images, strict=False)
    ]


def _extra_info(extra_info_json: str, result: EpisodeResult) -> str:
    """The dataset's extra_info with the episode's `messages`, and its environment's rewards where there are some."""
    try:
        info = json.loads(extra_info_json or "{}") or {}
    except ValueError:
        # The scorer reports the error in it.
        return extra_info_json
    if not isinstance(info, dict):
        return extra_info_json
    if result.messages:
        info["messages"] = list(result.messages)
    if result.rewards is not None:
        info["environment_reward"] = dict(result.rewards)
    if result.step_rewards:
        info["environment_steps"] = list(result.step_rewards)
    # Messages come from tools and users' code: values without a form in JSON become text.
    return json.dumps(info, default=str)
