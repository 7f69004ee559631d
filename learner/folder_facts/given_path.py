"""A model as it is given: a folder, or a hub id. Anything else is refused by what it is, with the way to a model.

Nothing heavy is imported here, and nothing is fetched.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from rollmesh.mesh.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_ANY = "give a Hugging Face model folder (config.json, model.safetensors), or a hub id like org/name"
# Other forms of a folder or file, by what is in it or by its name's end.
_FORMS = {
    "*.gguf": ("holds GGUF, a form for inference", "give the Hugging Face folder from which it was made"),
    "model_index.json": ("is a pipeline of diffusers, and no language model", _ANY),
    "params.json": (
        "has its maker's own form",
        "give the model's Hugging Face folder, whose name often ends in -hf; or convert it with transformers",
    ),
    "*.distcp": ("is a checkpoint of torch", "export it as a Hugging Face folder first"),
    "*.nemo": ("holds NeMo's form", "export it as a Hugging Face folder first"),
}


def is_folder(path: str, setting: str) -> bool:
    """Whether a model's path is a folder here. Otherwise it is a hub id.

    Args:
        path: as given.
        setting: key of the configuration that names it.

    Raises:
        DataError: it is neither; says what it is.
    """
    folder = Path(path)
    if folder.is_dir():
        return True
    if folder.exists():
        raise _no_model(folder, setting)
    if path.startswith(".") or not _HUB_ID.fullmatch(path):
        raise DataError(f"{setting}: no such folder: {path}", hint=f"set {setting} to a folder that exists; {_ANY}")
    return False


def require_config(folder: Path, setting: str) -> Path:
    """The `config.json` of a model's folder.

    Args:
        folder: exists.
        setting: key of the configuration that names it.

    Raises:
        DataError: the folder has none; says what it is instead.
    """
    if not (folder / _CONFIG).is_file():
        raise _no_model(folder, setting)
    return folder / _CONFIG


def _no_model(path: Path, setting: str) -> DataError:
    """The error about a file, or about a folder without config.json."""
    for pattern, (what, hint) in _FORMS.items():
        if path.match(pattern) or (path.is_dir() and any(path.glob(pattern))):
            return DataError(f"{setting}: {path} {what}", hint=hint)
    if path.is_file():
        whole = (path.parent / _CONFIG).is_file()
        return DataError(
            f"{setting}: {path} is a file, and a model is a folder", hint=f"give {path.parent}" if whole else _ANY
        )
    if (path / _ADAPTER).is_file():
        return DataError(f"{setting}: {path} is an adapter, and no model", hint=_way_of_adapter(path, setting))
    if inner := _inner(path):
        return DataError(f"{setting}: {path} has no {_CONFIG}; {inner} has one", hint=f"give {inner}")
    if (path / "state.json").is_file():
        return DataError(
            f"{setting}: {path} is a checkpoint of a run", hint=f"`rollmesh export {path} OUT`, and give OUT"
        )
    return DataError(f"{setting}: {path} has no {_CONFIG}", hint=_ANY)


def _way_of_adapter(path: Path, setting: str) -> str:
    try:
        base = json.loads((path / _ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = None
    model = f"{setting}={base}" if isinstance(base, str) and base else f"{setting}=ITS_BASE"
    if setting != "model.path":
        return f"merge it with peft (`merge_and_unload`), and give the merged model's folder; its base alone is {model}"
    return (
        f"to train it further: {model}, learner.lora.start_from={path}; "
        f"`rollmesh eval` and `rollmesh generate` take it as --model {path}"
    )


def _inner(folder: Path) -> Path | None:
    """The only model below a folder: what a run has left, or the copy that a hub's cache holds."""
    places = (folder / "hf" / "last", folder / "hf" / "best", *folder.glob("*"), *folder.glob("snapshots/*"))
    found = [place for place in places if (place / _CONFIG).is_file()]
    return found[0] if found and (len(found) == 1 or found[0].parent.name == "hf") else None
