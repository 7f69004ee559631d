"""A reward model as transformers knows it: a sequence classifier with one label, whose score is read at the last token.

transformers finds the last token of a padded sequence as the last one that is not padding. So the padding token must be
another one than the end token, which responses end with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rollmesh.learner.model_files.carried_files import write_json
from rollmesh.learner.model_files.conversion import store_alike
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.value_head import HEAD
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.tokenizer_files import load_optional_tokenizer

SCORE = "score"
"""Prefix of the head's name in such folders."""


def classifier_name(name: str) -> str:
    """A value model's tensor as a classifier names it."""
    return f"{SCORE}{name.removeprefix(HEAD)}" if name.startswith(f"{HEAD}.") else name


def classifier_of(language_model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The classifier with a language model's backbone, without memory.

    Args:
        language_model: as `StoredModel` has opened it.
        folder: of the model, whose tokenizer gives the padding token.

    Raises:
        DataError: transformers has no such classifier.
    """
    config = deepcopy(language_model.config)
    config.num_labels = 1
    tokenizer = load_optional_tokenizer(folder)
    config.pad_token_id = None if tokenizer is None else padding_token(tokenizer)
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise DataError(
            f"transformers has no sequence classifier for models of the type {config.model_type}",
            hint="choose another model for the reward model",
        ) from error
    if not isinstance(model, PreTrainedModel) or not hasattr(model, SCORE):
        raise DataError(
            f"{type(model).__name__} has no head {SCORE!r}", hint="choose another model for the reward model"
        )
    store_alike(model, language_model)
    return model


def value_model_tensors(source: StoredModel) -> dict[str, Tensor]:
    """The tensors of a value model on a backbone, without memory: those of the backbone, and the head's weight.

    Args:
        source: the model, open; its output layer is not used.
    """
    prefix = f"{source.model.base_model_prefix}."
    backbone = {name: tensor for name, tensor in source.describe().items() if name.startswith(prefix)}
    width = source.model.config.get_text_config().hidden_size
    return backbone | {f"{HEAD}.weight": torch.empty(1, width, device="meta")}


def write_classifier(
    folder: Path,
    source: StoredModel,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Writes a value model as a sequence classifier; arguments and errors as those of `write_folder`.

    Args:
        folder: made where it is absent.
        source: gives configuration and tokenizer; it becomes the classifier.
        described, tensors, dtype: of the value model.
    """
    source.model = classifier_of(source.model, source.folder)
    renamed = ((classifier_name(name), tensor) for name, tensor in tensors)
    write_folder(folder, source, {classifier_name(name): one for name, one in described.items()}, renamed, dtype)
    set_padding(folder)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """A token for padding that no response ends with; None where there is none."""
    end = tokenizer.eos_token_id
    candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids)
    return next((token for token in candidates if isinstance(token, int) and token != end), None)


def set_padding(folder: Path) -> None:
    """Has the tokenizer of a classifier's folder pad as its configuration says.

    Raises:
        DataError: the tokenizer cannot be read.
    """
    tokenizer = load_optional_tokenizer(folder)
    if tokenizer is None:
        return
    token = padding_token(tokenizer)
    if token is not None and token != tokenizer.pad_token_id:
        # The tokenizer's own writing could change more than that.
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_json(path, settings | {"pad_token": tokenizer.convert_ids_to_tokens(token)})
