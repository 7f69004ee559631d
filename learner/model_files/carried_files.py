"""The files of a model's folder that belong to every folder written from it, as they are: training changes none.

transformers would write the tokenizer's again, in the form of its own class, which may read texts otherwise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.mesh.chat.end_tokens import GENERATION_FILE
from rollmesh.mesh.model_bundle import TEMPLATES, is_bundled

CONFIG_FILE = "config.json"
# Keys of JSON files that name code, which is never run here, and those of the first that name a model's.
_CODE, _PIPELINES = "auto_map", "custom_pipelines"
_OF_MODELS = ("AutoConfig", "AutoModel")
_TERMS = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
# Those with values of this writing, and those of other programs' trainings and formats.
_LEFT = frozenset(
    (
        CONFIG_FILE,
        GENERATION_FILE,
        "adapter_config.json",
        "trainer_state.json",
        "all_results.json",
        "train_results.json",
        "eval_results.json",
        "quantize_config.json",
    )
)


def carried_names(folder: Path) -> list[str]:
    """Names of the files that are carried, relative to the folder, in order."""
    paths = [path for place in (folder, folder / TEMPLATES) if place.is_dir() for path in place.iterdir()]
    names = (path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return sorted(name for name in names if _is_carried(name))


def copy_carried(source: Path, out: Path) -> None:
    """Copies them; with code, where one of them names some that is there.

    Args:
        source: folder of the model.
        out: exists.

    Raises:
        OSError: a file cannot be copied.
    """
    for name in carried_names(source):
        (out / name).parent.mkdir(exist_ok=True)
        values = _naming_code(source / name)
        if values is None or (kept := with_code_that_is_kept(values, source)) == values:
            shutil.copyfile(source / name, out / name)
        else:
            write_json(out / name, kept)
    found = (_naming_code(source / name) for name in (*carried_names(source), CONFIG_FILE))
    if any(_code_of(with_code_that_is_kept(values, source)) for values in found if values is not None):
        # A module may import others next to it.
        for path in source.glob("*.py"):
            shutil.copyfile(path, out / path.name)


def with_code_that_is_kept(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The object of a JSON file without names of code that is not there, and of a model's code.

    A written folder names none for its model, as the class of transformers was trained. The code of a tokenizer stays
    named: without it transformers would choose another class also where it may not run the code.

    Args:
        values: the object.
        folder: of the model that was trained.
    """
    known = values.get(_CODE)
    left = {name: value for name, value in known.items() if not name.startswith(_OF_MODELS)} if known else {}
    kept = {key: value for key, value in values.items() if key not in (_CODE, _PIPELINES)}
    there = all((folder / file).is_file() for file in _code_of({_CODE: left}))
    return kept | {_CODE: left} if left and there else kept


def files_without_code(folder: Path) -> list[str]:
    """Names of the JSON files that name code which is not there, in order."""
    names = [name for name in (*carried_names(folder), CONFIG_FILE) if (folder / name).is_file()]
    return sorted(
        name
        for name in names
        if any(not (folder / code).is_file() for code in _code_of(_naming_code(folder / name) or {}))
    )


def names_model_code(folder: Path) -> bool:
    """Whether a folder names code for its model."""
    known = (_naming_code(folder / CONFIG_FILE) or {}).get(_CODE) or {}
    return any(name.startswith(_OF_MODELS) for name in known)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON object as transformers does."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_carried(name: str) -> bool:
    return name not in _LEFT and (is_bundled(name) or ("/" not in name and name.upper().startswith(_TERMS)))


def _naming_code(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file that names code; None: it names none."""
    text = path.read_bytes() if path.suffix == ".json" else b""
    # Tokenizers are large.
    if not any(f'"{key}"'.encode() in text for key in (_CODE, _PIPELINES)):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    named = isinstance(values, dict) and isinstance(values.get(_CODE, {}), dict)
    return values if named and (_CODE in values or _PIPELINES in values) else None


def _code_of(values: Mapping[str, Any]) -> list[str]:
    """The files of code that an object names in its own folder."""
    named = _texts([values.get(_CODE), values.get(_PIPELINES)])
    # Behind two dashes it is code of another repository.
    own = {text.rpartition(".")[0] for text in named if "." in text and "--" not in text}
    return sorted(f"{module.replace('.', '/')}.py" for module in own)


def _texts(value: Any) -> list[str]:
    """All texts within a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []
