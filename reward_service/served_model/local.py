"""The engine `transformers`: forward passes in this process."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.served_model.engine import RefusedError, activated, label_index
from rollmesh.reward_service.served_model.folders import CAUSAL, CLASSIFIER, STEP_HEAD, TOKEN_CLASSIFIER, kind_of
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.texts import Sequence

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

KINDS = {"response": (CLASSIFIER,), "steps": (TOKEN_CLASSIFIER, STEP_HEAD, CAUSAL)}


class LocalModel:
    """A model of transformers.

    Args:
        options: of the model.
        tokenizer: of the model.

    Raises:
        RewardError: it cannot be loaded, or has no such label.
    """

    lanes = 1

    def __init__(self, options: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        import torch

        self._options = options
        self._device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kind = kind_of(Path(options.folder), KINDS[options.kind], "model of this form")
        try:
            self._model, labels = _load(kind, options)
            self._model.to(self._device)
        except (OSError, ValueError, RuntimeError) as error:
            raise RewardError(f"reward model {options.folder} cannot be loaded: {error}") from error
        self._label = label_index(options, labels)
        # A causal model has two tokens for its labels.
        self._columns = _token_ids(options, tokenizer) if kind == CAUSAL else None
        text_config = self._model.config.get_text_config()
        self.longest = getattr(text_config, "max_position_embeddings", None)
        self._padding: int | None = text_config.pad_token_id
        # A classifier of transformers finds the last token by the padding, and takes one sequence without one.
        self._pads = kind != CLASSIFIER or self._padding is not None

    def values(self, batch: Listed[Sequence]) -> list[list[float]]:
        """See `Engine`."""
        import torch

        try:
            if self._pads:
                return self._pass(batch)
            return [values for sequence in batch for values in self._pass([sequence])]
        except torch.OutOfMemoryError as error:
            raise RefusedError(f"the device has not enough memory: {error}") from error

    def _pass(self, batch: Listed[Sequence]) -> list[list[float]]:
        """One forward pass, padded on the right."""
        import torch

        longest = max(len(sequence.ids) for sequence in batch)
        padding = self._padding or 0
        padded = [[*sequence.ids, *[padding] * (longest - len(sequence.ids))] for sequence in batch]
        ids = torch.tensor(padded, device=self._device)
        # The padding token may stand in a text too, so the mask follows from the lengths.
        lengths = torch.tensor([[len(sequence.ids)] for sequence in batch], device=self._device)
        mask = (torch.arange(longest, device=self._device) < lengths).long()
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=ids, attention_mask=mask).logits
            if logits.dim() == 2:
                logits = logits[:, None]
                rows = [logits[index, [0]] for index in range(len(batch))]
            else:
                rows = [logits[index, sequence.places] for index, sequence in enumerate(batch)]
            if self._columns is not None:
                rows = [row[:, self._columns] for row in rows]
            listed = [row.float().tolist() for row in rows]
        return [[activated(each, self._label, self._options.activation) for each in row] for row in listed]


def _load(kind: str, options: ModelOptions) -> tuple[Any, dict[int, str]]:
    """A model, and the names of its labels."""
    import transformers

    opened = {"local_files_only": True, "use_safetensors": True, "dtype": options.dtype}
    if kind == CAUSAL:
        if not (options.good and options.bad):
            raise RewardError(
                f"{options.folder} is a causal language model", hint="set reward.process.good and reward.process.bad"
            )
        model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, trust_remote_code=False, **opened)
        return model.eval(), {0: options.bad, 1: options.good}
    if kind == STEP_HEAD:
        from rollmesh.reward_service.served_model.step_head import load_step_head

        return load_step_head(Path(options.folder), opened), {0: "bad", 1: "good"}
    classes: dict[str, Any] = {
        CLASSIFIER: transformers.AutoModelForSequenceClassification,
        TOKEN_CLASSIFIER: transformers.AutoModelForTokenClassification,
    }
    auto = classes[kind]
    model = auto.from_pretrained(options.folder, trust_remote_code=False, **opened).eval()
    return model, {int(index): str(name) for index, name in model.config.id2label.items()}


def _token_ids(options: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of bad and good steps: the last one of each text, after the space that tokenizers put before it."""
    found = []
    for text in (options.bad, options.good):
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise RewardError(f"the text {text!r} has no token")
        found.append(ids[-1])
    return found
