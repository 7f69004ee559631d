"""A model and its tokenizer from a folder of configuration and tokenizer files, without weights.

The parameters are left uninitialized: an engine serves nothing before its first weights have been swapped in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from rollmesh.generators.engines.hf.model.served_layers import layout_of, read_config
from rollmesh.generators.engines.request_validation import Limits
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.images import ImageProcessor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Vision-language models whose images take plain positions, are seen causally, and enter as input embeddings alone.
_WITH_IMAGES = {"llava", "idefics3", "smolvlm"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine needs to know of a model.

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
    def limits(self) -> Limits:
        """What requests have to keep to."""
        return Limits(
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
    tokenizer = load_tokenizer(folder)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids(folder, text_config, tokenizer),
        context=min(layout.longest, context or layout.longest),
        layer_types=layout.layer_types,
        window=layout.window,
        images=ImageProcessor.load(folder) if takes_images else None,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None where it has no tokenizer files.

    Raises:
        DataError: the files are there but cannot be read.
    """
    if not any(folder.glob("tokenizer*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}: tokenizer files cannot be read: {error}") from error
    return tokenizer


def eos_ids(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The generation configuration names the end tokens; else the model's configuration; else the tokenizer."""
    declared: Any = None
    if (folder / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if declared is None:
        declared = getattr(config, "eos_token_id", None)
    if declared is None and tokenizer is not None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list | tuple) else (int(declared),)
