"""NeMo Gym's `POST /verify` of a resources server: a task's fields with a response in, `reward` out.

The response is an object of OpenAI's Responses API. The task's fields are the row's extra_info, with the ground truth
as `expected_answer` where there is none. Source: NeMo Gym 0.4.0, `nemo_gym/base_resources_server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.reward_service.adapters.results import OutputError, number, numbers_of
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored

# Fields of every answer; other numbers there are the environment's own.
_OWN = frozenset({"reward", "mask_sample", "failure_kind", "failure_reason", "reward_components"})


def verify_body(item: RewardItem) -> dict[str, Any]:
    """The request about an item."""
    prompt = item.extra_info.get("prompt_messages") or [{"role": "user", "content": item.prompt}]
    body = {"responses_create_params": {"input": prompt}, **item.extra_info, "response": _response(item)}
    if item.ground_truth is not None:
        body.setdefault("expected_answer", item.ground_truth)
    return body


def read_verified(body: Mapping[str, Any], answer: Any) -> Outcome:
    """The outcome of an answer to `body`. A masked sample is a failure of the environment, not a reward.

    Raises:
        OutputError: it is none.
    """
    if not isinstance(answer, Mapping) or "reward" not in answer:
        raise OutputError("gave an answer without 'reward'")
    if answer.get("mask_sample"):
        reason = answer.get("failure_reason") or "the environment gave no reason"
        return Failed(str(answer.get("failure_kind") or "masked"), str(reason), retryable=True)
    own = {key: value for key, value in answer.items() if key not in _OWN and key not in body}
    components = answer.get("reward_components") or {}
    if not isinstance(components, Mapping):
        raise OutputError("gave reward_components that are no object")
    return Scored(number(answer["reward"]), {**numbers_of(own), **numbers_of(components)})


def _response(item: RewardItem) -> dict[str, Any]:
    text = {"type": "output_text", "text": item.response, "annotations": []}
    message = {
        "id": f"msg_{item.item_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        "id": f"resp_{item.item_id}",
        "created_at": 0,
        "model": item.run or "policy",
        "object": "response",
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
