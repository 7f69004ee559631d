"""On the path of one test's processes: the forward pass of engine hf raises at the prompt in ROLLMESH_TEST_POISON."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import ModuleType
from typing import Any

_MODULE = "generators.engines.hf.prefill"
_POISON = tuple(json.loads(os.environ["ROLLMESH_TEST_POISON"]))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        run: Any = spec.loader.exec_module

        def run_and_poison(module: ModuleType) -> None:
            run(module)
            forward = module.Prefiller._forward

            def failing(self: Any, sequences: Any, images: Any) -> Any:
                if any(tuple(ids[: len(_POISON)]) == _POISON for ids in sequences):
                    raise RuntimeError("illegal instruction")
                return forward(self, sequences, images)

            module.Prefiller._forward = failing

        spec.loader.exec_module = run_and_poison  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
