"""The folder of a judging model, read without loading anything heavy."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.mesh.errors import RewardError

CLASSIFIER = "ForSequenceClassification"
TOKEN_CLASSIFIER = "ForTokenClassification"  # noqa: S105  # a model's kind
STEP_HEAD = "ForProcessRewardModel"
CAUSAL = "ForCausalLM"


def kind_of(folder: Path, kinds: tuple[str, ...], what: str) -> str:
    """The kind of a model, by the end of its class' name in `config.json`.

    Args:
        folder: of the model.
        kinds: those that will do; the first one is taken for a folder that does not say.
        what: a model of these kinds, in words.

    Raises:
        RewardError: there is no model, or one of another kind.
    """
    path = folder / "config.json"
    if not path.is_file():
        trained = sorted(left.parent for left in folder.glob("hf/*/config.json"))
        if trained:
            raise RewardError(f"{folder} is the folder of a run, and no model", hint=f"use {trained[-1]}")
        raise RewardError(f"reward model {folder} does not exist", hint="name the folder of a model")
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise RewardError(f"reward model {folder} cannot be loaded: {error}") from error
    if not names:
        return kinds[0]
    for kind in kinds:
        if any(str(name).endswith(kind) for name in names):
            return kind
    raise RewardError(
        f"reward model {folder} is a {names[0]}, and no {what}",
        hint=f"its class has to end with {' or '.join(kinds)} (`rollmesh rm` trains a sequence classifier)",
    )
