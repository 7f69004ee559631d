"""A model as its folder describes it, read before any engine is started: what cannot work is refused early."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.mesh.chat.end_tokens import end_tokens
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.tokenizer_files import load_optional_tokenizer
from rollmesh.mesh.trajectory.images import ImageProcessor


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its folder describes it.

    Attributes:
        limits: of requests.
        tokenizer: None where the folder has no tokenizer files.
        images: the processor of a model that takes images; None: it takes text alone.
        experts: it is a mixture of experts.
    """

    limits: RequestLimits
    tokenizer: PreTrainedTokenizerBase | None
    images: ImageProcessor | None = None
    experts: bool = False

    def for_text(self) -> ModelInfo:
        """The same model, used for text alone."""
        return replace(self, limits=replace(self.limits, images=False), images=None)


def read_folder(folder: Path, context: int | None) -> ModelInfo:
    """Reads configuration and tokenizer; local files only.

    Args:
        folder: a Hugging Face model folder; no weights needed.
        context: tokens of the longest sequence that will be asked for; None, or more than the model can: what it
            can.

    Raises:
        DataError: it is missing or cannot be read.
    """
    config = read_config(folder)
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise DataError(f"{folder}/config.json: no max_position_embeddings", hint="state the model's context length")
    tokenizer = load_optional_tokenizer(folder)
    pictured = getattr(config, "vision_config", None) is not None
    images = ImageProcessor.load(folder) if pictured else None
    limits = RequestLimits(
        context=min(longest, context or longest),
        vocabulary=int(text.vocab_size),
        eos=frozenset(end_tokens(folder, config, tokenizer).all),
        text=tokenizer is not None,
        images=images is not None,
    )
    return ModelInfo(limits, tokenizer, images, bool(getattr(text, "num_experts_per_tok", None)))
