"""The layers of the house: who may import whom, how long a file may be, and what the text may not contain."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"buffer", "reward_service", "generators", "learner"}
PACKAGES = ["protos", "mesh", *sorted(SERVICES), "rollmesh"]
BEYOND_ALGORITHMS = {"grpc", "redis", "transformers", "protos", "buffer", "generators", "mesh"}
HEAVY = {"vllm", "sglang", "megatron", "wandb", "flash_attn", "peft", "tensorboard"}
# Where an engine's own package lives, nothing else imports it at the top: it is loaded with the engine.
ENGINES = {name: ROOT / "generators" / "engines" / name for name in ("vllm", "sglang")}
FILES = [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")) if "_pb2" not in p.name]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top level) of every import in a file."""
    tree = _tree(path)
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def _offence(path: Path, module: str, at_top: bool) -> str | None:
    """The rule that an import breaks."""
    package, first = path.relative_to(ROOT).parts[0], module.split(".")[0]
    if first in PACKAGES[:-1]:
        return "our own modules are imported as `rollmesh.`"
    target = next((name for name in PACKAGES if module.startswith(f"rollmesh.{name}.")), first)
    if package in ("protos", "mesh") and target in SERVICES | {"rollmesh"}:
        return "the foundation imports no service"
    if package in SERVICES and target == "rollmesh":
        return "a service does not import the front door"
    if package in SERVICES and target in SERVICES - {package} and ".client" not in module:
        return "a service is imported through its client module"
    if path.is_relative_to(ROOT / "learner" / "algorithms") and target in BEYOND_ALGORITHMS:
        return "algorithms know torch alone"
    if at_top and target in HEAVY and not (target in ENGINES and path.is_relative_to(ENGINES[target])):
        return "heavy packages are imported where they are used"
    for name, home in ENGINES.items():
        if at_top and module.startswith(f"rollmesh.generators.engines.{name}.") and not path.is_relative_to(home):
            return "an engine is loaded by its name"
    return None


# All files in one test each: a test for each file would cost more than what it does.
def test_imports_respect_the_layers() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}: {offence}"
        for path in FILES
        for module, at_top in _imports(path)
        if (offence := _offence(path, module, at_top))
    ]
    assert not found, "\n".join(found)


def test_files_are_short_and_say_what_they_are() -> None:
    assert not [path for path in FILES if len(path.read_text().splitlines()) > 600], "too long"
    silent = [path for path in FILES if _tree(path).body and not ast.get_docstring(_tree(path))]
    assert not silent, "a module says what it is"


def test_the_command_loads_without_torch() -> None:
    code = (
        "import sys, rollmesh.cli, rollmesh.launcher.local; "
        "print(sorted({'torch', 'transformers', 'pyarrow', 'matplotlib'} & set(sys.modules)))"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
