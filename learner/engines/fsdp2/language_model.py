"""A causal language model: log-probs and entropies of the trained tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.output_layer import OutputLayer
from rollmesh.learner.engines.fsdp2.runner import ImagesRefusedError, ModelRunner
from rollmesh.learner.engines.output.layer import LogitMemory
from rollmesh.learner.engines.output.log_probs import token_log_probs
from rollmesh.learner.engines.output.logit_form import LogitForm, UnknownFormError, find_backbone, read_logit_form
from rollmesh.learner.engines.output.softmax_pieces import Targets
from rollmesh.learner.vision.tower import RowImages, VisionTower

log = logging.getLogger(__name__)


class LanguageModel(nn.Module):
    """A language model that can give log-probs in place of logits; parameters keep their names.

    Args:
        whole: the language model; its output layer is replaced.
        form: of its logits.
        memory: for its logits.
        tower: of a model that takes images.
    """

    def __init__(
        self, whole: PreTrainedModel, form: LogitForm, memory: LogitMemory, tower: VisionTower | None = None
    ) -> None:
        super().__init__()
        self._tower = tower
        backbone = find_backbone(whole)
        whole.set_output_embeddings(OutputLayer(whole.get_output_embeddings(), form, memory))
        for name, child in whole.named_children():
            self.add_module(name, child)
            if child is backbone:
                self._backbone_name = name
            elif isinstance(child, OutputLayer):
                self._head_name = name
        # Not the model itself: its modules are those of this one.
        self._plain_forward = whole.forward

    def forward(
        self,
        *,
        logits_to_keep: Tensor,
        targets: Opaque[Targets] | None = None,
        images: Opaque[RowImages] | None = None,
        **inputs: Any,
    ) -> Any:
        """The output of transformers, or with targets the log-probs of their tokens.

        Args:
            logits_to_keep: int64 [R], places among the tokens, row after row.
            targets: of these R.
            images: of the tokens; where the output is that of transformers, they are among the inputs.
            inputs: of the backbone.

        Returns:
            With targets those of `OutputLayer`.
        """
        if targets is None:
            return self._plain_forward(logits_to_keep=logits_to_keep, **inputs)
        if images is not None and self._tower is not None:
            inputs["inputs_embeds"] = self._tower.embed(inputs.pop("input_ids"), images.value)
        hidden: Tensor = self.get_submodule(self._backbone_name)(**inputs).last_hidden_state
        # An embedding look-up is a gather with a fast backward; see `attention`.
        chosen = functional.embedding(logits_to_keep, hidden.flatten(0, 1))
        return self.get_submodule(self._head_name)(chosen, targets)


class LanguageModelRunner(ModelRunner):
    """Any Hugging Face causal language model with attention that can run packed."""

    _whole_logits = False

    def _build(self, language_model: PreTrainedModel) -> nn.Module:
        for child in language_model.children():
            if isinstance(child, PreTrainedModel):
                child.register_forward_hook(_in_one_row)
        memory = LogitMemory(self._spec.memory.logits_mib << 20, rounded=not self._spec.float32_logits)
        try:
            form = read_logit_form(language_model)
        except UnknownFormError as unknown:
            if self.tower is not None:
                raise ImagesRefusedError(self._spec.model.path, str(unknown)) from unknown
            self._whole_logits = True
            if self.layout.leads:
                log.warning(
                    "model %r: all logits of a micro-batch are held at once: %s", self._spec.model.path, unknown
                )
            return language_model
        return LanguageModel(language_model, form, memory, self.tower)

    @contextmanager
    def in_eager_rows(self) -> Iterator[None]:
        """Computes, within the context, as transformers alone would, logits included."""
        whole, self._whole_logits = self._whole_logits, True
        try:
            with super().in_eager_rows():
                yield
        finally:
            self._whole_logits = whole

    def forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        part = self._own_part(batch.row)
        inputs, predictors = self._inputs(part)
        targets = Targets(
            part.labels,
            part.temperatures,
            entropy_gradient=self._spec.entropy_gradient and torch.is_grad_enabled(),
            sum_pi_squared=sum_pi_squared,
        )
        inputs |= {"logits_to_keep": predictors, "use_cache": False}
        inputs |= self._image_inputs(batch.row, inputs["input_ids"])
        if self._whole_logits:
            output = token_log_probs(self.module(**inputs).logits.squeeze(0), targets)
        else:
            output = ModelOutput(*self.module(targets=Opaque(targets), **inputs))
        output = self._gather_output(part, output)
        return output, output.policy()[0]

    def empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        none = torch.zeros(0, device=self.device)
        return ModelOutput(log_probs=none, entropy=none, sum_pi_squared=none if sum_pi_squared else None)


def _in_one_row(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Hidden states row after row, [1, S * L, H]: so `logits_to_keep` picks tokens of all rows."""
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[None]
    return output
