"""Writes the kit as one file: `python -m rollmesh.reward_service.conformance.build reward-kit.pyz`.

The file needs Python 3.11, grpcio and protobuf, and nothing else. It holds all that `command.py` imports. Packages
become empty, and messages come from their descriptors, so that any recent protobuf will do.
"""

from __future__ import annotations

import ast
import sys
import zipapp
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rollmesh.protos import reward_pb2

ENTRY = "rollmesh.reward_service.conformance.command"
_MESSAGES = "rollmesh.protos.reward_pb2"
_PACKS = "rollmesh.reward_service.conformance.packs"
_MESSAGES_SOURCE = '''"""The messages of the contract, from its descriptors."""

from google.protobuf import descriptor_pool, message_factory

DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({descriptor!r})
globals().update(
    {{name: message_factory.GetMessageClass(each) for name, each in DESCRIPTOR.message_types_by_name.items()}}
)
'''


def modules() -> dict[str, str]:
    """The modules of the kit: name -> source; packages by their own name."""
    found: dict[str, str] = {}
    waiting = [ENTRY]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if name == _MESSAGES:
            found[name] = _MESSAGES_SOURCE.format(descriptor=reward_pb2.DESCRIPTOR.serialized_pb)
            continue
        source = _path(name).read_text(encoding="utf-8")
        found[name] = source
        waiting += _imported(source)
    return found


def build(target: Path) -> None:
    """Writes the file."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name, source in modules().items():
            is_package = name != _MESSAGES and _path(name).name == "__init__.py"
            path = root / f"{name.replace('.', '/')}{'/__init__' if is_package else ''}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        for package in {path.parent for path in root.rglob("*.py")} | {root / "rollmesh"}:
            (package / "__init__.py").touch()
        for file in resources.files(_PACKS).iterdir():
            if file.name.endswith(".jsonl"):
                (root / _PACKS.replace(".", "/") / file.name).write_bytes(file.read_bytes())
        (root / "__main__.py").write_text(f"import sys\n\nfrom {ENTRY} import main\n\nsys.exit(main())\n")
        zipapp.create_archive(root, target, interpreter="/usr/bin/env python3", compressed=True)


def _path(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _imported(source: str) -> Iterator[str]:
    """Modules of ours that a source imports at its top."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollmesh."):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if _is_module(whole) else str(node.module)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "reward-kit.pyz"))
