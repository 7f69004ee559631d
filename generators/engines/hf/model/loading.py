"""A model and its tokenizer from a folder of configuration and tokenizer files, without weights.

The parameters are left uninitialized: an engine serves nothing before its first weights have been swapped in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from rollmesh.generators.engines.hf.model.served_layers import layout_of
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.mesh.chat.end_tokens import end_tokens
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import naming_config, read_config
from rollmesh.mesh.tokenizer_files import load_optional_tokenizer
from rollmesh.mesh.trajectory.images import ImageProcessor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Vision-language models with images that take plain positions, are seen causally, and enter as input embeddings alone.
_WITH_IMAGES = {"llava", "idefics3", "smolvlm"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, and the properties that the engine needs.

    Attributes:
        model: in evaluation mode, without gradients; parameters hold arbitrary values.
        tokenizer: None where the folder has no tokenizer files.
        eos_ids: tokens that end a response.
        context: longest sequence (prompt and response) in tokens.
        layer_types: `full_attention` or `sliding_attention`, one per layer.
        window: tokens that a sliding layer sees, the current one included; None without such layers.
        images: the processor of a model that takes images; None: it takes text alone.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    eos_ids: tuple[int, ...]
    context: int
    layer_types: tuple[str, ...]
    window: int | None
    images: ImageProcessor | None = None

    @property
    def limits(self) -> RequestLimits:
        """Limits of requests."""
        return RequestLimits(
            context=self.context,
            vocabulary=int(self.model.config.get_text_config().vocab_size),
            eos=frozenset(self.eos_ids),
            text=self.tokenizer is not None,
            images=self.images is not None,
        )


def load_model(folder: Path, *, dtype: str, device: str, context: int | None = None) -> LoadedModel:
    """Builds model and tokenizer from local files only.

    Args:
        folder: configuration and tokenizer files.
        dtype: float32, bfloat16 or float16.
        device: torch device.
        context: tokens of the longest sequence; None, or more than the model can: what the model can.

    Raises:
        DataError: the folder is missing, has no readable configuration, or its architecture cannot be served.
    """
    config = read_config(folder)
    layout = layout_of(config, folder)
    text_config = config.get_text_config()
    implementation = "eager" if getattr(text_config, "attn_logit_softcapping", None) else "sdpa"
    takes_images = config.model_type in _WITH_IMAGES
    factory: Any = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    with naming_config(folder):
        try:
            with no_init_weights():
                model = factory.from_config(
                    config, dtype=_DTYPES[dtype], attn_implementation=implementation, trust_remote_code=False
                )
        except ValueError as error:
            raise DataError(
                f"{folder}: not a causal language model: {error}",
                hint=f"of vision-language models the hf engine serves {', '.join(sorted(_WITH_IMAGES))}",
            ) from error
    model.tie_weights()
    model.to(device).eval().requires_grad_(False)
    tokenizer = load_optional_tokenizer(folder)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_ids=end_tokens(folder, config, tokenizer).all,
        context=min(layout.longest, context or layout.longest),
        layer_types=layout.layer_types,
        window=layout.window,
        images=ImageProcessor.load(folder) if takes_images else None,
    )
