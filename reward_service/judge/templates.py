"""Templates: a YAML file with the texts `system`, `user` and, for rows with a ground truth, `reference`.

Invariants: placeholders are filled in one pass, so that braces in a response are text and fetch nothing. Marks that
contain `{boundary}` cannot be forged by a response: it depends on a secret of this process.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.outcomes import RewardItem

Messages = list[dict[str, str]]
Mode = Literal["score", "pairs"]

_HERE = Path(__file__).parent
_TEXTS = ("system", "user", "reference")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_COMMON = frozenset({"prompt", "ground_truth", "boundary", "low", "high"})
_RESPONSES: Mapping[Mode, frozenset[str]] = {
    "score": frozenset({"response"}),
    "pairs": frozenset({"first", "second"}),
}
_EXTRA = "extra."


class Template:
    """The texts of a question.

    Args:
        path: the file; None: the one of the package.
        mode: decides which placeholders there are.
        scale: least and largest score.

    Raises:
        RewardError: the file cannot be read, lacks a text, or has a placeholder that does not exist.

    Attributes:
        texts: by name, with their placeholders.
    """

    def __init__(self, path: Path | None, mode: Mode, scale: tuple[float, float]) -> None:
        self.texts: Mapping[str, str] = _read(path or _HERE / f"{mode}.yaml")
        self._scale = {"low": f"{scale[0]:g}", "high": f"{scale[1]:g}"}
        known = _COMMON | _RESPONSES[mode]
        for name, text in self.texts.items():
            found = {field for field in _PLACEHOLDER.findall(text) if not field.startswith(_EXTRA)}
            allowed = known if name == "reference" else known | {"reference"}
            if unknown := sorted(found - allowed):
                raise RewardError(
                    f"reward.judge.template: {name} has {{{unknown[0]}}}, which does not exist",
                    hint=f"there are {', '.join(f'{{{field}}}' for field in sorted(allowed))} and {{extra.NAME}}",
                )
        if missing := sorted(_RESPONSES[mode] - set(_PLACEHOLDER.findall(self.texts["user"]))):
            raise RewardError(f"reward.judge.template: user lacks {{{missing[0]}}}, so the judge would not see it")

    def messages(self, item: RewardItem, responses: Mapping[str, str]) -> Messages:
        """The messages of a question.

        Args:
            item: prompt, ground truth and extra_info.
            responses: texts by placeholder.

        Raises:
            PayloadError: the template needs a field that the row lacks.
        """
        values: dict[str, Any] = {"prompt": item.prompt, **responses, **self._scale}
        if item.ground_truth is not None:
            values["ground_truth"] = item.ground_truth
        values["boundary"] = _boundary(values)
        reference = self.texts.get("reference", "")
        values["reference"] = _filled(reference, values, item) if item.ground_truth is not None else ""
        return [
            {"role": role, "content": _filled(self.texts[role], values, item)}
            for role in ("system", "user")
            if role in self.texts
        ]


def _read(path: Path) -> dict[str, str]:
    try:
        texts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RewardError(f"reward.judge.template {path} cannot be read: {error}") from error
    if not isinstance(texts, dict) or "user" not in texts or not all(isinstance(text, str) for text in texts.values()):
        raise RewardError(
            f"reward.judge.template {path} has no text `user`", hint="a YAML file with the texts system and user"
        )
    if unknown := sorted(str(name) for name in texts if name not in _TEXTS):
        raise RewardError(
            f"reward.judge.template {path}: unknown text {unknown[0]!r}", hint=f"known: {', '.join(_TEXTS)}"
        )
    return texts


def _filled(text: str, values: Mapping[str, Any], item: RewardItem) -> str:
    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field.startswith(_EXTRA):
            return _as_text(_inside(item.extra_info, field.removeprefix(_EXTRA)))
        if field not in values:
            raise PayloadError(field, "the judge's template needs it, and the row has none")
        return _as_text(values[field])

    return _PLACEHOLDER.sub(value, text)


def _inside(extra_info: Mapping[str, Any], path: str) -> Any:
    found: Any = extra_info
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise PayloadError(f"extra_info.{path}", "the judge's template needs it, and the row has none")
        found = found[part]
    return found


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def _secret() -> bytes:
    """Made at its first use: processes that were forked with this module loaded have one each."""
    return secrets.token_bytes(32)


def _boundary(values: Mapping[str, Any]) -> str:
    """A word that no text can hold on purpose, the same for the same texts."""
    content = json.dumps(values, sort_keys=True, default=str).encode()
    return hmac.new(_secret(), content, hashlib.sha256).hexdigest()[:12]
