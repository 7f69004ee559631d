"""The Dockerfile: it installs what is in the repository, and a change of the code costs its last layers alone."""

from __future__ import annotations

import json
import re
from typing import get_args

from rollmesh.mesh.config.rollout import EngineName
from tests.deploy.containers import DEPLOY
from tests.repository import REPOSITORY

DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
ALLOWED = re.findall(r"^!(\S+)$", (REPOSITORY / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)


def stages() -> dict[str, str]:
    """The text of each stage, by name."""
    found = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_the_context_holds_every_package_and_only_what_exists() -> None:
    for source in ALLOWED:
        assert (REPOSITORY / source).exists(), f"{source} is let into the context but is not in the repository"
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    packages = {name.rstrip("*") for name in re.findall(r'"(\w+\*)"', project)}
    assert packages <= set(ALLOWED)
    used = re.findall(r"^COPY (\S+) \S+$", DOCKERFILE, re.MULTILINE)
    used += re.findall(r"type=bind,source=([^,]+),", DOCKERFILE)
    assert set(used) <= set(ALLOWED)


def test_there_is_a_stage_for_each_engine_and_device() -> None:
    names = set(stages())
    assert {name for name in names if name.startswith("engine-")} == {f"engine-{name}" for name in get_args(EngineName)}
    assert {"base-cpu", "base-cuda", "rollmesh"} <= names
    assert list(stages())[-1] == "rollmesh", "a build without --target makes the image"


def test_sources_come_after_all_that_is_downloaded() -> None:
    for name, text in stages().items():
        assert ("examples" in text) == ("target=/source" in text) == (name == "rollmesh"), name
    assert "apt-get" not in stages()["rollmesh"]


def test_places_that_may_have_mirrors_are_arguments() -> None:
    for argument in ("CPU_BASE", "CUDA_BASE", "TORCH", "TORCH_OPTIONS"):
        assert re.search(rf"^ARG {argument}=", DOCKERFILE, re.MULTILINE)
    for base in re.findall(r"^ARG \w+_BASE=(.*)$", DOCKERFILE, re.MULTILINE):
        assert re.search(r":\d+\.\d+\.\d+", base), "a version, not a moving name"


def test_labels_name_version_and_revision() -> None:
    for label, argument in {"version": "VERSION", "revision": "REVISION"}.items():
        assert f'org.opencontainers.image.{label}="${{{argument}}}"' in DOCKERFILE


def test_the_development_container_has_what_the_tests_want() -> None:
    lines = (REPOSITORY / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8").splitlines()
    settings = json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))
    build = settings["build"]
    assert (REPOSITORY / ".devcontainer" / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    [wanted] = re.findall(r"apt-get install .*--no-install-recommends (.*)$", makefile, re.MULTILINE)
    assert set(wanted.split()) <= set(stages()[build["target"]].split())
    assert re.search(rf"^{settings['postCreateCommand'].removeprefix('make ')}:", makefile, re.MULTILINE)
