"""Code that a folder brings along for a model type that transformers knows: it is never run, which is said or refused.

A class of transformers' own name is its predecessor, as in many published folders. A class of another name computes
something that transformers does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollmesh.learner.model_files.checks import read_model_config
from rollmesh.mesh.errors import DataError

_MODELS = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq")
_TOKENIZER = "AutoTokenizer"


def describe_model_code(folder: Path, setting: str, model: PreTrainedModel) -> Iterator[str]:
    """Says that the code which `config.json` names is not run.

    Args:
        folder: of the model.
        setting: key of the configuration that names it.
        model: as transformers has opened it.

    Raises:
        DataError: transformers has no class of that name.
    """
    config, own = read_model_config(folder, setting), type(model).__name__
    classes = list(_classes(config, _MODELS))
    if not classes:
        return
    architectures = config.get("architectures")
    named = [str(name) for name in architectures] if isinstance(architectures, list) else []
    unknown = [name for name in (*classes, *named) if not hasattr(transformers, name)]
    if unknown:
        raise DataError(
            f"{setting}: config.json of {folder} names code of its own, {', '.join(dict.fromkeys(unknown))}, which "
            f"transformers does not have; its {own} would take that one's place",
            hint="code of a model is never run here. If it computes the same, remove auto_map from config.json, and "
            f'set architectures there to ["{own}"]',
        )
    yield f"the code that config.json of {folder} names (auto_map) is not run: transformers' {own} takes its place"


def describe_tokenizer_code(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Says that the code which `tokenizer_config.json` names is not run."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if any(_classes(config, [_TOKENIZER])):
        own = type(tokenizer).__name__
        yield f"the code that {path} names (auto_map) is not run: transformers' {own} takes its place"


def _classes(config: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    """Names of classes in `auto_map`: each is a text `module.Class`, perhaps with a repository, or a list of some."""
    code = config.get("auto_map")
    if not isinstance(code, Mapping):
        return
    for key in keys:
        value = code.get(key)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str):
                yield path.rpartition(".")[2]
