"""The layers of the house: who may import whom, how long a file may be, and what the text may not contain."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"buffer", "reward_service", "generators", "learner"}
PACKAGES = ["protos", "mesh", *sorted(SERVICES), "rollmesh"]
HEAVY = {"vllm", "sglang", "megatron", "wandb", "flash_attn", "peft", "tensorboard"}
# Where an engine's own package lives, nothing else imports it at the top: it is loaded with the engine.
ENGINES = {name: ROOT / "generators" / "engines" / name for name in ("vllm", "sglang")}
FILES = [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")) if "_pb2" not in p.name]


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level) of every import in a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_imports_respect_the_layers(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for module, at_top in _imports(path):
        target = module.split(".")[0]
        if package in ("protos", "mesh"):
            assert target not in SERVICES | {"rollmesh"}, f"{module}: the foundation imports no service"
        if package in SERVICES:
            assert target != "rollmesh", f"{module}: a service does not import the front door"
            if target in SERVICES - {package}:
                assert ".client" in module, f"{module}: a service is imported through its client module"
        if path.is_relative_to(ROOT / "learner" / "algorithms"):
            assert target not in {"grpc", "redis", "transformers", "protos", "buffer", "generators", "mesh"}, module
        at_home = target in ENGINES and path.is_relative_to(ENGINES[target])
        assert at_home or not (target in HEAVY and at_top), f"{module}: heavy packages are imported where they are used"
        for name, home in ENGINES.items():
            inside = module.startswith(f"generators.engines.{name}.")
            assert not (inside and at_top) or path.is_relative_to(home), f"{module}: an engine is loaded by its name"


@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module says what it is"


def test_the_command_loads_without_torch() -> None:
    code = (
        "import sys, rollmesh.cli; print(sorted({'torch', 'transformers', 'pyarrow', 'matplotlib'} & set(sys.modules)))"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
