"""A stored Hugging Face language model: its modules without memory, its weights where they are, the way between.

Whatever transformers knows is fine: local folders, hub ids in the local cache, one safetensors file or several, tied
embeddings, experts stored one by one. Invariant: everything is found out from configuration and headers; no weight is
read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollmesh.learner.folder_facts.quantization import refuse_quantized
from rollmesh.learner.model_files.conversion import LoadingPlan, plan_loading
from rollmesh.learner.model_files.weight_files import WeightFiles
from rollmesh.learner.vision.families import family_of
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import naming_config, read_config

_NAMED = 3


class StoredModel:
    """A model folder that is open for loading.

    Args:
        folder: of the model.
        device: on which buffers are computed.
        backbone_only: the output layer is not used: it may be absent, and other heads may be there.

    Attributes:
        model: parameters in float32 without memory, buffers computed on the device. It is in evaluation mode: dropout
            would make the current policy differ from the one with the compared log-probs.
        files: the weights.
        plan: the way from the stored tensors to the parameters.
        folder, backbone_only: as given.
        is_part: the folder has more than a language model, such as a vision tower, and this is that model alone.

    Raises:
        DataError: no model, one with code of its own, or weights that are not those of its configuration; names them.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu", *, backbone_only: bool = False) -> None:
        self.folder, self.backbone_only = folder, backbone_only
        config = _read_trainable(folder)
        self.model = _without_weights(config, folder, torch.device(device))
        self.is_part = config.model_type != self.model.config.model_type
        self.files = WeightFiles(folder)
        try:
            self.plan = self._plan()
            self._check(backbone_only)
        except BaseException:
            self.files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def embedding_rows(self) -> int:
        """Token ids that the model has an embedding for."""
        weight: Tensor = self.model.get_input_embeddings().get_parameter("weight")
        return weight.shape[0]

    def describe(self) -> dict[str, Tensor]:
        """The model's tensors without memory, by name: parameters, tied ones once, and buffers that are stored."""
        stored = self.model.state_dict().keys()
        buffers = {name: buffer.to("meta") for name, buffer in self.model.named_buffers() if name in stored}
        return dict(self.model.named_parameters()) | buffers

    @property
    def needed(self) -> list[str]:
        """Names of the stored tensors, without those whose values another one has by a tie."""
        state = self.model.state_dict(keep_vars=True)
        named = dict(self.model.named_parameters())
        tied = {name for name, tensor in state.items() if tensor.requires_grad and name not in named}
        twins = {name for one in self.plan.conversions if one.target in tied for name, _ in one.sources}
        return [name for name in self.files.stored if name not in twins]

    def close(self) -> None:
        """Closes the files."""
        self.files.close()

    def _plan(self) -> LoadingPlan:
        try:
            with quiet_transformers():
                return plan_loading(self.model, self.files.stored)
        except ValueError as error:
            raise DataError(f"model {self.folder}: {error}", hint="download or copy the folder again") from error

    def _check(self, backbone_only: bool) -> None:
        """Refuses weights that are not those of the configuration."""
        prefix = f"{self.model.base_model_prefix}." if backbone_only else ""
        expected = self.model.state_dict(keep_vars=True)
        shapes = [
            f"{name} is {list(made.shape)} instead of {list(expected[name].shape)}"
            for conversion in self.plan.conversions
            for name, made in conversion.results.items()
            if name in expected and made.shape != expected[name].shape and name.startswith(prefix)
        ]
        problems = {
            "lacks weights": [name for name in self.plan.missing if name.startswith(prefix)],
            "holds weights that are not used": [name for name in self.plan.unexpected if name.startswith(prefix)],
            "holds a second tensor for what the model has once": self.plan.doubled,
            "holds weights of another shape than config.json says": shapes,
        }
        told = [f"{problem}: {_first(names)}" for problem, names in problems.items() if names]
        if told:
            raise DataError(
                f"model {self.folder} ({type(self.model).__name__}) {'; it '.join(told)}", hint=self._remedy()
            )

    def _remedy(self) -> str:
        head = self.model.get_output_embeddings()
        weight = None if head is None else head.weight
        if [id(self.model.get_parameter(name)) for name in self.plan.missing] == [id(weight)]:
            return (
                "if the embedding is its output layer too, set tie_word_embeddings: true in its config.json; "
                "otherwise choose a complete causal language model"
            )
        if self.plan.doubled:
            return "store each tensor once, under the name that transformers' save_pretrained gives it"
        return "choose a complete causal language model; a value model's folder has no output layer"


def _read_trainable(folder: Path) -> PreTrainedConfig:
    """The configuration of a model.

    Raises:
        DataError: transformers knows no such model, or its weights are quantized.
    """
    config = read_config(folder)
    refuse_quantized(folder, config.to_dict(), {})
    return config


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' messages about weights that do not fit and settings that do not exist."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _without_weights(config: PreTrainedConfig, folder: Path, device: torch.device) -> PreTrainedModel:
    with naming_config(folder):
        model = build_on_meta(config)
    if not isinstance(model, PreTrainedModel):
        raise DataError(f"{folder} is not a causal language model")
    _compute_buffers(model, device)
    return model.eval()


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """A language model without memory; of a family that is trained with images, with its vision part.

    Args:
        config: of the model.
    """
    factory: Any = AutoModelForCausalLM if family_of(config) is None else AutoModelForImageTextToText
    with torch.device("meta"):
        # Attention is chosen by transformers, for a configuration may name kernels, which it would fetch and load.
        model: PreTrainedModel = factory.from_config(
            config, dtype=torch.float32, attn_implementation=None, trust_remote_code=False
        )
    return model


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes buffers, as rotary frequencies, by transformers' own initialization, and nothing else."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            empty = torch.empty_like(buffer, device=device)
            module.register_buffer(name, empty, persistent=name not in module._non_persistent_buffers_set)
    for parameter in model.parameters():
        # Its mark of what it leaves alone.
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' * (len(names) > _NAMED)}"
