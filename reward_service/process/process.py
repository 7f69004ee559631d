"""Rewards of steps as a reward function: a process reward model gives each step of a response a value.

With `per_step` the values are the outcome's spans, which the caller gives to the last token of each step. A sequence
classifier will do too: it is asked for the response up to the end of each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollmesh.mesh.config.scorers.process import NAME, ProcessSection
from rollmesh.mesh.wait import Wait
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.process.steps import Place, split, total_of
from rollmesh.reward_service.served_model.folders import CAUSAL, CLASSIFIER, STEP_HEAD, TOKEN_CLASSIFIER, kind_of
from rollmesh.reward_service.served_model.messages import Text
from rollmesh.reward_service.served_model.model import Answer, ServedModel
from rollmesh.reward_service.served_model.options import model_options, prompt_messages, told_version, version_of

_KINDS = (TOKEN_CLASSIFIER, STEP_HEAD, CAUSAL, CLASSIFIER)


class ProcessRewards:
    """Asks a process reward model.

    Args:
        section: of the configuration, with a model.
        call_timeout_s: seconds in which a call has to end, `reward.scorer_timeout_s`.

    Attributes:
        rollmesh_service: its process, which the scoring engine starts and ends.
        wants, deterministic, needs_group: see `reward_service.functions`.
        version: of its scores, for people.
        cache_version: see `reward_service.cache.identity`.

    Raises:
        RewardError: the folder holds no model that judges steps.
    """

    __name__ = NAME

    deterministic = True
    needs_group = False

    def __init__(self, section: ProcessSection, *, call_timeout_s: float) -> None:
        options = model_options(section, "steps", call_timeout_s)
        kind = kind_of(Path(options.folder), _KINDS, "model that judges steps")
        self._by_prefix = kind == CLASSIFIER
        if self._by_prefix:
            options = model_options(section, "response", call_timeout_s)
        self._section = section
        self.wants = () if section.template == "text" else ("messages",)
        self.version = told_version(section)
        self.cache_version = repr((section, version_of(options)))
        self.rollmesh_service = self._model = ServedModel(NAME, options, call_timeout_s=call_timeout_s)

    def present_wait(self) -> Wait:
        """The reason why items wait; empty while the model answers."""
        return self._model.present_wait()

    async def __call__(self, item: RewardItem) -> Outcome:
        """The outcome of an item, with the values of its steps; unscorable where there is no step."""
        places = split(item.response, self._section.steps, item.spans)
        if not places:
            return Unscorable("the response has no step")
        return self._outcome(places, await self._model.ask(self._texts(item, places)))

    def _texts(self, item: RewardItem, places: Sequence[Place]) -> list[Text]:
        messages = prompt_messages(item)
        if self._by_prefix:
            return [(item.prompt, item.response[:end], messages) for _, end in places]
        return [(item.prompt, [item.response[begin:end] for begin, end in places], messages)]

    def _outcome(self, places: Sequence[Place], answers: Sequence[Answer]) -> Outcome:
        values: list[float] = []
        for answer in answers:
            if isinstance(answer, Failed):
                return answer
            values += answer
        spans = []
        if self._section.per_step:
            spans = [(begin, end, value) for (begin, end), value in zip(places, values, strict=True)]
        parts = {"steps": float(len(values)), "least": min(values), "last": values[-1]}
        evidence = ", ".join(f"{begin}-{end}: {value:.4g}" for (begin, end), value in zip(places, values, strict=True))
        return Scored(total_of(values, self._section.total), parts, spans=spans, evidence=f"steps {evidence}")
