"""Rows become prompt tasks: chat template, tokenisation, length check.

A string prompt is tokenised with the tokenizer's own special tokens. Chat messages go through its chat template with a
generation prompt, which brings its special tokens itself.

Agents with tools or an environment need chat messages, and the model is shown the schemas of its tools. Where an
environment drives the episodes its first observation continues within the last user message. Such a prompt ends there,
open: without the end of the message and without a generation prompt, which the generator adds, masked. Rows that end
with another message get an empty user message for it.

Prompts of rows with images hold one placeholder token per image; their length counts these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollmesh.learner.data.images import MARK, load_images, split_images
from rollmesh.learner.data.parts.token_rows import refuse_beyond
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.agent_tools import agent_schemas
from rollmesh.mesh.chat.arguments import TemplatesByArguments
from rollmesh.mesh.chat.asking import AskedTemplate
from rollmesh.mesh.chat.words import check_words
from rollmesh.mesh.config.inputs import SourceSampling
from rollmesh.mesh.errors import DataError, PayloadError
from rollmesh.mesh.masked_text import encode_text
from rollmesh.mesh.trajectory.images import ImageProcessor, digest_tokens
from rollmesh.mesh.trajectory.seeds import derived_seed
from rollmesh.protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollmesh.mesh.config.rollout import AgentSection


# Stands where an open prompt ends.
_MARK = "rollmeshopen"


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that cannot be rolled out; `origin` is its file, and its number there."""

    origin: str
    reason: Literal["empty_prompt", "long_prompt"]
    tokens: int


@dataclass(frozen=True, slots=True)
class TaskShape:
    """Settings that all tasks of a table share.

    Attributes:
        n: responses per prompt, those decoded greedily as baselines not counted.
        temperature, max_tokens, top_p, top_k, stop: how tokens are drawn, see `SamplingParams` of the contract.
        greedy: further responses per prompt, decoded greedily whatever the temperature.
        seed: of the table, from which each task has its own.
    """

    n: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    greedy: int = 0
    seed: int = 0

    def of_source(self, own: SourceSampling) -> TaskShape:
        """The shape of a source's tasks, with the settings that it has itself."""
        if own == SourceSampling():
            return self
        given = own.model_dump(exclude_none=True)
        if "max_response_tokens" in given:
            given["max_tokens"] = given.pop("max_response_tokens")
        return replace(self, **given)

    def sampling(self, task_id: str) -> trajectory_pb2.SamplingParams:
        """Sampling parameters of the task of this name."""
        return trajectory_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=self.stop,
            seed=derived_seed(self.seed, task_id),
        )


@dataclass(frozen=True, slots=True)
class AgentPrompts:
    """Settings of prompts for agents.

    Attributes:
        tools: schemas that the model is shown.
        open: they end within their last user message.
        own: agents write the conversation themselves, from its first message on. The task of a row with chat messages
            then has only the token with which every conversation begins. The rest lies in the responses, masked, and
            their budget holds a prompt too.
    """

    tools: Sequence[Mapping[str, Any]] = field(default=())
    open: bool = False
    own: bool = False

    @classmethod
    def of(cls, agent: AgentSection) -> AgentPrompts | None:
        """The settings of a configuration; None without agents.

        Raises:
            ConfigError: its tools or its environment cannot be loaded.
        """
        if agent.kind == "none":
            return None
        return cls(agent_schemas(agent), open=agent.kind == "environment", own=agent.kind == "program")


class PromptEncoder:
    """Makes prompt tasks of rows.

    Args:
        tokenizer: of the model that is trained.
        max_prompt_tokens: longer prompts are refused.
        template_kwargs: extra arguments of `apply_chat_template`.
        agent: settings of agents; None: responses have one turn.
        images: of the model; None: rows with images are refused.
        places: rows of the model's embedding; None: not known.

    Attributes:
        tokenizer: see there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        template_kwargs: Mapping[str, Any],
        agent: AgentPrompts | None = None,
        images: ImageProcessor | None = None,
        places: int | None = None,
    ) -> None:
        self.tokenizer, self._places = tokenizer, places
        self._images = images
        self._max_tokens = max_prompt_tokens
        self._template_kwargs = dict(template_kwargs)
        self._agent = agent
        # The processor's template goes before the tokenizer's.
        own = images.chat_template if images is not None else None
        self._templates = TemplatesByArguments(tokenizer, template_kwargs, source=own or "")

    def encode(
        self, row: Row, shape: TaskShape, *, number: int, task_id: str, ordinal: int
    ) -> trajectory_pb2.PromptTask | RefusedRow:
        """The task of a row, or the reason why it is refused.

        Args:
            row: with its prompt.
            shape: of the tasks of its table.
            number: of the row among all rows of the data.
            task_id, ordinal: of the task, see the contract.

        Raises:
            ChatTemplateError: the tokenizer has no chat template, or that refuses the messages or loses words.
            DataError: a ground truth that is no JSON; unreadable or unusable images.
        """
        images = self._load(row)
        text, ids = self._tokenise(row)
        if not ids:
            return RefusedRow(row.origin, "empty_prompt", 0)
        seen = self._seen(row, ids, images)
        if len(seen) > self._max_tokens:
            return RefusedRow(row.origin, "long_prompt", len(seen))
        shape = shape.of_source(row.sampling)
        sampling = shape.sampling(task_id)
        if self._agent is not None and self._agent.own and not isinstance(row.prompt, str):
            ids = ids[:1]
            sampling.max_tokens += self._max_tokens - 1
        return trajectory_pb2.PromptTask(
            task_id=task_id,
            ordinal=ordinal,
            row=number,
            prompt_ids=np.asarray(ids, dtype="<i4").tobytes(),
            prompt_text=text,
            data_source=row.data_source,
            ground_truth_json=_as_json(row, "reward_model.ground_truth", row.ground_truth),
            extra_info_json=_as_json(row, "extra_info", row.extra_info) if row.extra_info else "",
            n=shape.n + shape.greedy,
            greedy=shape.greedy,
            sampling=sampling,
            messages_json=_as_json(row, "prompt", row.prompt) if self._with_messages(row) else "",
            images=images,
            seen=trajectory_pb2.SeenPrompt(tokens=len(seen), digest=digest_tokens(seen)) if images else None,
        )

    def ids(self, row: Row) -> list[int]:
        """Tokens of a row's prompt as the model sees it, whatever the limit.

        Raises:
            DataError: as `encode`.
        """
        images = self._load(row)
        return self._seen(row, self._tokenise(row)[1], images)

    def _load(self, row: Row) -> tuple[bytes, ...]:
        if not row.images:
            return ()
        if self._images is None:
            raise DataError(
                f"{row.origin} has images, which are not taken here",
                hint="images need the engine hf or vllm, and a model folder with a processor; those of training data "
                "also a model that is trained with images (docs/vision.md)",
            )
        if self._agent is not None:
            raise DataError(
                f"{row.origin} has images, and agents take text alone", hint="remove rollout.agent, or the images"
            )
        return load_images(row.origin, row.images)

    def _seen(self, row: Row, ids: list[int], images: tuple[bytes, ...]) -> list[int]:
        """Tokens that the model sees of a prompt."""
        if self._images is None or not ids:
            return ids
        try:
            return self._images.widened(ids, images)
        except PayloadError as error:
            raise DataError(f"{row.origin}: {error.message}", hint=error.hint) from error

    def _with_messages(self, row: Row) -> bool:
        return self._agent is not None and not isinstance(row.prompt, str)

    def _tokenise(self, row: Row) -> tuple[str, list[int]]:
        try:
            text, ids = self._text_and_ids(row)
            refuse_beyond(ids, self.tokenizer, self._places)
        except DataError as error:
            raise type(error)(f"{row.origin}: {error.message}", hint=error.hint) from error
        return text, ids

    def _text_and_ids(self, row: Row) -> tuple[str, list[int]]:
        if isinstance(row.prompt, str):
            if self._agent is not None and (self._agent.tools or self._agent.open):
                raise DataError(
                    "it holds a string, but tools and environments need chat messages",
                    hint='write the prompt as [{"role": "user", "content": ...}]',
                )
            if row.tools and self._agent is None:
                raise DataError(
                    "it has tools, and its prompt is a text, which shows none",
                    hint="write the prompt as messages, or remove the field `tools`",
                )
            text = row.prompt if self._images is None else row.prompt.replace(MARK, self._images.token)
            return text, encode_text(self.tokenizer, text)
        if not row.prompt:
            return "", []
        text = self._render(row)
        return text, encode_text(self.tokenizer, text, special_tokens=False)

    def _render(self, row: Row) -> str:
        tools = self._tools_of(row)
        if self._agent is not None and not row.template_kwargs.items() <= self._template_kwargs.items():
            raise DataError(
                f"it has chat_template_kwargs of its own: {', '.join(row.template_kwargs)}",
                hint="all turns of an agent are written with data.chat_template_kwargs: set them there, and leave the "
                "row's out",
            )
        asked = self._templates.of_row(row.template_kwargs, tools=bool(tools))
        if self._agent is not None and not (row.tools or asked.facts.tools):
            # The data's own prompts may describe them; the agent warns of it.
            tools = None
        messages: list[Any] = list(row.prompt)
        if self._images is not None:
            messages = split_images(messages)[0]
        if self._agent is None or not self._agent.open:
            return self._written(asked, messages, tools, generation_prompt=True)
        if messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": ""})
        content = messages[-1]["content"]
        marked = content + _MARK if isinstance(content, str) else [*content, {"type": "text", "text": _MARK}]
        messages[-1] = {**messages[-1], "content": marked}
        return self._written(asked, messages, tools, generation_prompt=False).rpartition(_MARK)[0]

    @staticmethod
    def _written(
        asked: AskedTemplate, messages: Sequence[Any], tools: Sequence[Any] | None, *, generation_prompt: bool
    ) -> str:
        fitted = asked.fit(messages, tools)
        text = asked.template.render(fitted, tools=tools, generation_prompt=generation_prompt)
        check_words(fitted, text)
        return text

    def _tools_of(self, row: Row) -> list[Any] | None:
        """The tools that the prompt of a row shows: an agent's, or the row's own."""
        if self._agent is None or self._agent.own:
            return list(row.tools) or None
        if row.tools and list(row.tools) != list(self._agent.tools):
            raise DataError(
                "it has tools of its own, and an agent calls those of rollout.agent",
                hint="leave the row's tools out, or name that column otherwise",
            )
        return list(self._agent.tools) or None


def _as_json(row: Row, field: str, value: Any) -> str:
    # Parquet holds dates and decimals, which JSON has not: they travel as text.
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{row.origin}: field `{field}` cannot be written as JSON: {error}") from error
