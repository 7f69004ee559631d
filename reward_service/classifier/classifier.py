"""A sequence classifier as a reward function: a prompt and a response in, one number out.

All callers share its process and its batches, see `served_model`. This process imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.mesh.config.scorers.classifier import ClassifierSection
from rollmesh.mesh.wait import Wait
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored
from rollmesh.reward_service.served_model.folders import CLASSIFIER, kind_of
from rollmesh.reward_service.served_model.messages import Text
from rollmesh.reward_service.served_model.model import ServedModel
from rollmesh.reward_service.served_model.options import model_options, prompt_messages, told_version, version_of


class Classifier:
    """Asks a classifier.

    Args:
        name: in components and errors.
        section: of the configuration, with a model.
        call_timeout_s: seconds in which a call has to end, `reward.scorer_timeout_s`.

    Attributes:
        rollmesh_service: its process, which the scoring engine starts and ends.
        wants, deterministic, needs_group: see `reward_service.functions`.
        version: of its scores, for people.
        cache_version: see `reward_service.cache.identity`.

    Raises:
        RewardError: the folder holds no sequence classifier.
    """

    deterministic = True
    needs_group = False

    def __init__(self, name: str, section: ClassifierSection, *, call_timeout_s: float) -> None:
        options = model_options(section, "response", call_timeout_s)
        kind_of(Path(options.folder), (CLASSIFIER,), "sequence classifier")
        self.__name__ = name
        self.wants = () if section.template == "text" else ("messages",)
        self.version = told_version(section)
        self.cache_version = version_of(options)
        self.rollmesh_service = self._model = ServedModel(name, options, call_timeout_s=call_timeout_s)

    def present_wait(self) -> Wait:
        """The reason why items wait; empty while the model answers."""
        return self._model.present_wait()

    async def __call__(self, item: RewardItem) -> Outcome:
        """The outcome of an item; `too_long` for one that is longer than the model knows."""
        (answer,) = await self._model.ask([_text(item)])
        return answer if isinstance(answer, Failed) else Scored(answer[0])


def _text(item: RewardItem) -> Text:
    """An item as the model reads it: all turns of an episode, judged at the end of the last one."""
    if item.messages and item.messages[-1].get("role") == "assistant":
        return item.prompt, str(item.messages[-1].get("content") or ""), [dict(each) for each in item.messages[:-1]]
    return item.prompt, item.response, prompt_messages(item)
