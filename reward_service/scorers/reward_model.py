"""A reward model's folder as a reward function: `model:FOLDER`, a sequence classifier with one label.

A group is scored at once, in micro-batches of similar lengths. The score is read at the end token, which every response
gets (`mesh.scored_text`). Each worker process that runs it loads the model once: `reward.workers` says how many there
are at most.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.scored_text import scored_tokens
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "model:"
# Padding included.
_TOKENS_PER_PASS = 16384


def is_reward_model(spec: object) -> bool:
    """True if a reward function is the folder of a reward model."""
    return isinstance(spec, str) and spec.startswith(PREFIX)


class RewardModel:
    """Scores responses with a model.

    Args:
        folder: of a sequence classifier with one label, with its tokenizer.

    Raises:
        RewardError: there is none, or it cannot be loaded.
    """

    wants = ()

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        _check_folder(folder)
        try:
            model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
            )
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise RewardError(f"reward model {folder} cannot be loaded: {error}") from error
        if model.config.num_labels != 1:
            labels = model.config.num_labels
            raise RewardError(f"reward model {folder} has {labels} labels", hint="a reward is one number: num_labels 1")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = model.eval()
        self._model.to(self._device)
        self._longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Scores of responses; `Failed("too_long")` for one that is longer than the model knows."""
        sequences = [self._tokens(item) for item in items]
        outcomes: list[Outcome] = [
            Failed("too_long", f"{len(ids)} tokens, and the reward model knows {self._longest}") for ids in sequences
        ]
        fitting = [place for place, ids in enumerate(sequences) if self._longest is None or len(ids) <= self._longest]
        fitting.sort(key=lambda place: len(sequences[place]), reverse=True)
        while fitting:
            count = max(1, _TOKENS_PER_PASS // len(sequences[fitting[0]]))
            chosen, fitting = fitting[:count], fitting[count:]
            for place, score in zip(chosen, self._scores([sequences[place] for place in chosen]), strict=True):
                outcomes[place] = Scored(score)
        return outcomes

    def _tokens(self, item: RewardItem) -> list[int]:
        ids: list[int] = scored_tokens(self._tokenizer, item.prompt, item.response).ids.tolist()
        return ids

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Scores of sequences in one pass, padded on the right."""
        padding = self._model.config.get_text_config().pad_token_id
        if padding is None:
            # transformers takes no more than one sequence then.
            return [score for ids in sequences for score in self._pass([ids], 0)]
        return self._pass(sequences, padding)

    def _pass(self, sequences: Sequence[Sequence[int]], padding: int) -> list[float]:
        import torch

        longest = max(map(len, sequences))
        ids = torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in sequences], device=self._device)
        # The padding token may stand in a text too, so the mask follows from the lengths.
        lengths = torch.tensor([[len(ids)] for ids in sequences], device=self._device)
        mask = (torch.arange(longest, device=self._device) < lengths).long()
        with torch.inference_mode():
            scores: list[float] = self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        return scores


def _check_folder(folder: Path) -> None:
    """Refuses a folder that holds no sequence classifier, before anything heavy is loaded."""
    path = folder / "config.json"
    if not path.is_file():
        trained = sorted(left.parent for left in folder.glob("hf/*/config.json"))
        if trained:
            raise RewardError(f"{folder} is the folder of a run, and no model", hint=f"use {PREFIX}{trained[-1]}")
        raise RewardError(f"reward model {folder} does not exist", hint=f"write {PREFIX}FOLDER")
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise RewardError(f"reward model {folder} cannot be loaded: {error}") from error
    if names and not any(str(name).endswith("ForSequenceClassification") for name in names):
        raise RewardError(
            f"reward model {folder} is a {names[0]}, and no sequence classifier",
            hint="train one with `rollmesh rm`, or save the model as AutoModelForSequenceClassification, num_labels 1",
        )
