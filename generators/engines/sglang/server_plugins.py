"""Plugins of SGLang for a server that is started here: each is a folder that its processes find on their PYTHONPATH.

SGLang looks for plugins among the packages that are installed, hence each folder looks like one.
"""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.sglang import grammar_plugin


def write(source: Path, folder: Path) -> None:
    """Writes a plugin.

    Args:
        source: module with a function `install`, which SGLang calls in each of a server's processes.
        folder: new or empty.
    """
    metadata = folder / f"{source.stem}-0.dist-info"
    metadata.mkdir(parents=True)
    (folder / source.name).write_bytes(source.read_bytes())
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{source.stem} = {source.stem}:install\n", encoding="utf-8"
    )


def write_grammars(model: ModelInfo, folder: Path) -> bool:
    """Writes the plugin that gives a server grammars, if they know the model's tokenizer.

    Args:
        model: that is served.
        folder: new or empty.

    Returns:
        Whether it was written.
    """
    if not isinstance(model.tokenizer, PreTrainedTokenizerFast):
        return False
    write(Path(grammar_plugin.__file__), folder)
    core = model.tokenizer.backend_tokenizer
    if core.padding is not None or core.truncation is not None:
        # A copy costs several times what its text does.
        core = copy(core)
        core.no_padding()
        core.no_truncation()
    facts = {"vocabulary": model.limits.vocabulary, "ends": sorted(model.limits.eos)}
    (folder / grammar_plugin.TOKENIZER).write_text(core.to_str(), encoding="utf-8")
    (folder / grammar_plugin.FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return True
