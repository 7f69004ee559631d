"""Model files that a generator accepts, whatever sends them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import rollmesh.generators.model_bundle
from rollmesh.generators.model_bundle import read_parts
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_bundle import is_bundled
from rollmesh.protos import weights_pb2


async def parts(*files: tuple[str, bytes]) -> AsyncIterator[weights_pb2.ModelFile]:
    for name, content in files:
        yield weights_pb2.ModelFile(name=name, content=content)


@pytest.mark.parametrize(
    "name",
    ["modeling.py", "model.safetensors", "pytorch_model.bin", "plugin.so", "a/config.json", "../config.json",
     "/etc/config.json", "additional_chat_templates/../../x.json", "additional_chat_templates/a/b.jinja",
     "./config.json", "model.safetensors.index.json", "", "config.json\0.json", "sitecustomize.pyc"],
)  # fmt: skip
async def test_no_file_but_a_models_configuration_is_taken(name: str) -> None:
    assert not is_bundled(name)
    with pytest.raises(DataError, match="none of a model's configuration"):
        await read_parts(parts(("config.json", b"{}"), (name, b"x")))


async def test_files_come_in_parts() -> None:
    given = [("config.json", b"{"), ("additional_chat_templates/tools.jinja", b"t"), ("config.json", b"}")]
    assert await read_parts(parts(*given)) == {
        "config.json": [b"{", b"}"],
        "additional_chat_templates/tools.jinja": [b"t"],
    }


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILE_BYTES", 3), ("MAX_BYTES", 5), ("MAX_FILES", 1)])
async def test_a_bundle_beyond_its_bounds_is_refused_while_it_comes(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollmesh.generators.model_bundle, limit, value)
    given = [("config.json", b"12"), ("tokenizer.json", b"34"), ("config.json", b"56")]
    with pytest.raises(DataError, match="too large at"):
        await read_parts(parts(*given))
