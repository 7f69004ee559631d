"""On the path of an engine's processes: it raises, in the process that answers, at one prompt of the data.

vLLM raises in its engine core where that takes a request up, SGLang in its server's front. The engine hf: poisoned.py.
ROLLMESH_TEST_POISON holds the prompt's tokens, as JSON.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_POISON = tuple(json.loads(os.environ["ROLLMESH_TEST_POISON"]))


def _taste(ids: Sequence[int]) -> None:
    if tuple(ids[: len(_POISON)]) == _POISON:
        raise RuntimeError("illegal instruction")


def _poison_vllm(module: ModuleType) -> None:
    take_up = module.EngineCore.preprocess_add_request

    def failing(self: Any, request: Any) -> Any:
        _taste(request.prompt_token_ids)
        return take_up(self, request)

    module.EngineCore.preprocess_add_request = failing  # type: ignore[attr-defined]


def _poison_sglang(module: ModuleType) -> None:
    validate = module.TokenizerManager._validate_one_request

    def failing(self: Any, request: Any, ids: Any) -> Any:
        _taste(ids)
        return validate(self, request, ids)

    module.TokenizerManager._validate_one_request = failing  # type: ignore[attr-defined]


_POISONED: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.engine.core": _poison_vllm,
    "sglang.srt.managers.tokenizer_manager": _poison_sglang,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in _POISONED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        run: Any = spec.loader.exec_module

        def run_and_poison(module: ModuleType) -> None:
            run(module)
            _POISONED[name](module)

        spec.loader.exec_module = run_and_poison  # type: ignore[method-assign]
        return spec


def _run_the_next() -> None:
    """The module of this name that would have been found without this one."""
    others = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder())
_run_the_next()
