"""From a row to a prompt task: chat template, tokenisation, length check.

A string prompt is tokenised with the tokenizer's own special tokens; chat messages go through its chat template with
a generation prompt, which brings its special tokens itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from learner.data.dataset import Row
from mesh.errors import DataError
from protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be rolled out."""

    row: int
    reason: Literal["empty_prompt", "long_prompt"]
    tokens: int


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What all tasks of a table have in common.

    Attributes:
        n: responses per prompt, those decoded greedily as baselines not counted.
        temperature, max_tokens, top_p, top_k, stop: how tokens are drawn, see `SamplingParams` of the contract.
        greedy: further responses per prompt, decoded greedily whatever the temperature.
    """

    n: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    greedy: int = 0

    def sampling(self) -> trajectory_pb2.SamplingParams:
        return trajectory_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )


class PromptEncoder:
    """Makes prompt tasks of rows.

    Args:
        tokenizer: of the model that is trained.
        max_prompt_tokens: longer prompts are refused.
        template_kwargs: extra arguments of `apply_chat_template`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int, template_kwargs: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_prompt_tokens
        self._template_kwargs = dict(template_kwargs)

    def encode(self, row: Row, shape: TaskShape, *, task_id: str, ordinal: int) -> trajectory_pb2.PromptTask | Refused:
        """The task of a row, or why there is none.

        Raises:
            DataError: chat messages and a tokenizer without (or with a failing) chat template; a ground truth that
                is not JSON.
        """
        text, ids = self._tokenise(row)
        if not ids:
            return Refused(row.index, "empty_prompt", 0)
        if len(ids) > self._max_tokens:
            return Refused(row.index, "long_prompt", len(ids))
        return trajectory_pb2.PromptTask(
            task_id=task_id,
            ordinal=ordinal,
            row=row.index,
            prompt_ids=np.asarray(ids, dtype="<i4").tobytes(),
            prompt_text=text,
            data_source=row.data_source,
            ground_truth_json=_as_json(row, "reward_model.ground_truth", row.ground_truth),
            extra_info_json=_as_json(row, "extra_info", row.extra_info) if row.extra_info else "",
            n=shape.n + shape.greedy,
            greedy=shape.greedy,
            sampling=shape.sampling(),
        )

    def _tokenise(self, row: Row) -> tuple[str, list[int]]:
        if isinstance(row.prompt, str):
            return row.prompt, list(self._tokenizer(row.prompt)["input_ids"]) if row.prompt else []
        if not row.prompt:
            return "", []
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"row {row.index} holds chat messages, but the tokenizer has no chat template",
                hint="use an instruction-tuned model's folder, or prompts that are plain strings",
            )
        text = self._render(row)
        return text, list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, row: Row) -> str:
        import jinja2

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    row.prompt,  # type: ignore[arg-type]  # the stub wants its own alias of list[dict[str, str]]
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._template_kwargs,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"row {row.index}: the chat template failed: {error}", hint="see data.chat_template_kwargs"
            ) from error


def _as_json(row: Row, field: str, value: Any) -> str:
    # Parquet holds dates and decimals, which JSON has not: they travel as text.
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:
        raise DataError(f"row {row.index}: field `{field}` cannot be written as JSON: {error}") from error
