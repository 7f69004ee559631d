"""The files of a data source: a file, a folder or a pattern of shards, a saved dataset, or a hub id.

Invariant: the files and their order depend on nothing but the source and what lies there. Files of folders and patterns
are in the order of their names. Nothing is read here but small files that describe others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError

JSON_LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
ARROW = ".arrow"
_FORMS = (PARQUET, *JSON_LINES)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WILD = re.compile(r"[*?\[]")
_HINT = (
    "give a Parquet or JSONL file, a folder or a pattern of these, a saved dataset, or a hub id like org/name; "
    "`rollmesh data prepare` makes files of published datasets"
)
# Files that `datasets.save_to_disk` writes next to the Arrow files: of a dataset, and of a dictionary of splits.
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_SPLIT = "train"


def data_files(source: DataSource, *, download: bool = True) -> list[Path]:
    """The files of a source, in their order, at least one.

    Args:
        source: as configured.
        download: fetch a hub id that the local cache lacks; False: use the cache alone.

    Raises:
        DataError: nothing is there, its form is unknown, or the hub id cannot be had.
    """
    path = Path(source.path)
    if path.is_file():
        return _known([path], source)
    if path.is_dir():
        if (path / _SAVED).is_file() or (path / _SAVED_SPLITS).is_file():
            return _saved_files(path, source)
        return _known(sorted(one for one in path.iterdir() if one.suffix.lower() in _FORMS), source)
    if _WILD.search(source.path):
        root = Path(path.anchor)
        return _known(sorted(one for one in root.glob(str(path.relative_to(root))) if not one.is_dir()), source)
    if is_hub_id(source.path):
        return _hub_files(source, download=download)
    raise DataError(f"dataset {path} does not exist", hint=_HINT)


def is_hub_id(path: str) -> bool:
    """True for a path that can only be a hub id: nothing is there, and it has no ending of a data file."""
    there = Path(path)
    return bool(_HUB_ID.fullmatch(path)) and there.suffix.lower() not in _FORMS and not there.exists()


def _known(files: Sequence[Path], source: DataSource) -> list[Path]:
    """The files, where there are some and all have one known form."""
    if not files:
        raise DataError(f"dataset {source.path} has no files", hint=_HINT)
    if source.split is not None or source.subset is not None:
        raise DataError(
            f"dataset {source.path} has neither splits nor subsets: it is made of plain files",
            hint="leave split and subset out, and name the files",
        )
    return _one_form(files, source)


def _one_form(files: Sequence[Path], source: DataSource) -> list[Path]:
    # No one would notice a shard that is left out, and a pipe is waited for.
    if odd := next((file for file in files if not file.is_file()), None):
        raise DataError(
            f"dataset {odd} is no regular file, nor a link to one", hint="remove it, or copy the file there again"
        )
    forms = {PARQUET if file.suffix.lower() == PARQUET else JSON_LINES[0] for file in files}
    if unknown := next((file for file in files if file.suffix.lower() not in _FORMS), None):
        raise DataError(f"dataset {unknown} has an unknown form", hint="use .parquet or .jsonl files")
    if len(forms) > 1:
        raise DataError(
            f"dataset {source.path} has Parquet and JSONL files, which may be the same rows twice",
            hint="name those of one form: FOLDER/*.parquet",
        )
    return list(files)


def _saved_files(folder: Path, source: DataSource) -> list[Path]:
    """The Arrow files of a folder of `datasets.save_to_disk`."""
    if source.subset is not None:
        raise DataError(f"dataset {folder} is a saved one, which has no subsets", hint="leave subset out")
    if (folder / _SAVED_SPLITS).is_file():
        splits = _described(folder / _SAVED_SPLITS).get("splits", [])
        folder = folder / _chosen_split(splits, source)
    elif source.split is not None:
        raise DataError(f"dataset {folder} was saved without splits", hint="leave split out")
    state = _described(folder / _SAVED)
    files = [folder / str(item["filename"]) for item in state.get("_data_files", [])]
    absent = [file.name for file in files if not file.is_file()]
    if absent or not files:
        raise DataError(
            f"saved dataset {folder} is incomplete: it lacks {', '.join(absent) or 'data files'}",
            hint="save it again with datasets.save_to_disk",
        )
    return files


def _described(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        why = "it holds no object"
    except (OSError, ValueError) as error:
        why = str(error)
    raise DataError(f"saved dataset {path} cannot be read: {why}", hint="save it again with datasets.save_to_disk")


def _chosen_split(splits: Sequence[str], source: DataSource) -> str:
    wanted = source.split or (splits[0] if len(splits) == 1 else _SPLIT)
    if wanted not in splits:
        raise DataError(
            f"dataset {source.path} has no split {wanted!r}; it has: {', '.join(splits) or 'none'}",
            hint="name one: {path: ..., split: NAME}",
        )
    return wanted


# ------------------------------------------------------------------------------------------ the hub


def _hub_files(source: DataSource, *, download: bool) -> list[Path]:
    """The files of a split, in the local copy of a hub id."""
    folder = _snapshot(source, ["README.md"], download=download)
    described = _hub_splits(folder / "README.md", source)
    if described is not None:
        patterns = described[_chosen_split(list(described), source)]
    else:
        split, inner = source.split or _SPLIT, f"{source.subset}/" if source.subset else ""
        patterns = [f"{inner}{middle}*{split}*{form}" for middle in ("", "data/") for form in (PARQUET, *JSON_LINES)]
    folder = _snapshot(source, patterns, download=download)
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    if not files:
        raise DataError(
            f"dataset {source.path} has no Parquet or JSONL files of {source.split or _SPLIT!r}",
            hint="set split and subset, or name local files",
        )
    return _one_form(files, source)


def _hub_splits(card: Path, source: DataSource) -> dict[str, list[str]] | None:
    """Patterns of files by split, as the dataset's card says for the subset; None where it says nothing."""
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    found = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        raise DataError(f"dataset {source.path}: the head of its README.md is no YAML: {error}") from error
    given = values.get("configs") if isinstance(values, dict) else None
    described = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    subsets = {str(item["config_name"]): item.get("data_files") for item in described if "config_name" in item}
    if not subsets:
        return None
    marked = [str(item.get("config_name")) for item in described if item.get("default")]
    likely = [*marked, *(name for name in subsets if name == "default"), *(subsets if len(subsets) == 1 else ())]
    subset = source.subset or next(iter(likely), None)
    if subset not in subsets:
        wrong = f"no subset {subset!r}" if subset else "several subsets"
        raise DataError(f"dataset {source.path} has {wrong}: {', '.join(subsets)}", hint="set subset to one of these")
    files = subsets[subset]
    if isinstance(files, str) or (isinstance(files, list) and files and isinstance(files[0], str)):
        files = [{"split": _SPLIT, "path": files}]
    if not isinstance(files, list):
        return None
    splits: dict[str, list[str]] = {}
    for item in files:
        paths = item.get("path") if isinstance(item, dict) else None
        patterns = [paths] if isinstance(paths, str) else paths
        if not isinstance(patterns, list) or not patterns or "split" not in item:
            raise _wrong_card(source, f"an entry of data_files has no split or no path: {item}")
        splits[str(item["split"])] = [_inner(pattern, source) for pattern in patterns]
    return splits


def _inner(pattern: Any, source: DataSource) -> str:
    """A pattern of a card, which names files of its dataset alone: cards are strangers' texts."""
    if not isinstance(pattern, str) or not pattern or not stays_inside(pattern):
        raise _wrong_card(source, f"data_files names {pattern!r}, which lies outside of the dataset")
    return pattern


def stays_inside(path: str) -> bool:
    """True for a relative path or pattern that does not leave its folder."""
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def _wrong_card(source: DataSource, why: str) -> DataError:
    return DataError(f"dataset {source.path}: its README.md is wrong: {why}", hint="download it, and name its files")


def _snapshot(source: DataSource, patterns: list[str], *, download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                source.path,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=patterns,
                local_files_only=not download,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"dataset {source.path!r} is neither here nor available from the hub: {error}",
            hint="check path and revision; without network the hub's local cache must hold it",
        ) from error
