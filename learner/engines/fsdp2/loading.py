"""Loading a Hugging Face causal language model for training.

Whatever transformers loads is fine: local folders, hub ids with a pinned revision, offline caches, sharded safetensors
in any dtype, tied embeddings. Master weights are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rollmesh.learner.engines.fsdp2.architecture import refuse_by_structure
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_model(section: ModelSection, *, backbone_only: bool = False, longest: int | None = None) -> PreTrainedModel:
    """Loads the model in float32 on the CPU, with the attention that transformers chooses and without dropout.

    Args:
        section: folder or hub id.
        backbone_only: the output layer is not used: it may be absent, and other heads may be there.
        longest: tokens of the longest sequence, where it is known.

    Raises:
        DataError: missing folder or hub id; a folder that is no model or lacks weights; sequences too long to compute
            side by side.
    """
    source = _source(section)
    # Bars of a fraction of a second would only disturb the service's log.
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=False)
        refuse_by_structure(config, section.path, longest)
        with quiet_transformers() if backbone_only else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                revision=section.revision,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                trust_remote_code=False,
            )
    # RuntimeError: weights of another shape than config.json says.
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"cannot load model {section.path!r}: {_first_line(error)}",
            hint="model.path is a local Hugging Face folder or a hub id; offline it must be in the local cache",
        ) from error
    model, info = loaded
    if not isinstance(model, PreTrainedModel):
        raise DataError(f"{section.path!r} is not a causal language model")
    missing = sorted(set(info["missing_keys"]) & {name for name, _ in model.named_parameters()})
    if backbone_only:
        prefix = f"{model.base_model_prefix}."
        missing = [name for name in missing if name.startswith(prefix)]
    if missing:
        # transformers would make them up.
        raise DataError(
            f"model {section.path!r} lacks weights: {', '.join(missing[:3])}{' ...' if missing[3:] else ''}",
            hint="choose a complete causal language model; a value model's folder has no output layer",
        )
    model.config.use_cache = False
    # Dropout would make the current policy differ from the one whose log-probs are compared.
    return model.eval()


def load_optional_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model, for the export of its weights; None where it has none, or none that can be read."""
    source = _source(section)
    # Without any tokenizer file transformers would make up an empty tokenizer.
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=section.revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers: the elements of the largest module list. Those of a hybrid model are of several classes."""
    best: nn.ModuleList | None = None
    size = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            weight = sum(parameter.numel() for parameter in module.parameters())
            if weight > size:
                best, size = module, weight
    return list(best) if best is not None else []


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' messages about weights that do not fit and settings that do not exist."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _source(section: ModelSection) -> str:
    path = Path(section.path)
    looks_local = section.path.startswith((".", "/")) or section.path.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DataError(f"{path} has no config.json", hint="model.path must be a Hugging Face model folder")
        return str(path)
    if looks_local:
        raise DataError(f"model folder {section.path!r} does not exist", hint="set model.path")
    return section.path


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
