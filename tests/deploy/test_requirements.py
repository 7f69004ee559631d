"""The lists of exact versions: all that is required, in versions that are taken, with the hashes of their files."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
LISTS = [
    "requirements.txt",
    "requirements-dev.txt",
    "engines/vllm-cpu.txt",
    "engines/sglang-cpu.txt",
    "agents/clients.txt",
]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def _parsed(lines: list[str]) -> list[Requirement]:
    """Packages that lines ask for on this machine, less rollmesh itself and torch, which are in no list."""
    found = [Requirement(line) for line in lines]
    found = [item for item in found if item.name not in ("rollmesh", "torch")]
    return [item for item in found if item.marker is None or item.marker.evaluate()]


def _listed(path: str) -> dict[str, str]:
    """Version of each package on this machine; fails where one is not exact, lacks hashes or is listed twice."""
    found: dict[str, str] = {}
    text = (DEPLOY / path).read_text(encoding="utf-8")
    for row in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines():
        line, *hashes = row.split(" --hash=")
        assert hashes, f"{line!r} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value.strip()) for value in hashes)
        for requirement in _parsed([line]):
            [exact] = requirement.specifier
            assert exact.operator == "==", f"{line!r} is no exact version"
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} twice"
            found[name] = exact.version
    return found


def _lacking(required: list[Requirement], listed: dict[str, str]) -> list[str]:
    """Requirements that a list does not fulfil."""
    return [
        str(requirement)
        for requirement in required
        if not requirement.specifier.contains(listed.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]


@pytest.mark.parametrize("path", LISTS)
def test_a_list_is_exact_names_files_by_their_hashes_and_no_place(path: str) -> None:
    assert len(_listed(path)) > 70
    assert "://" not in (DEPLOY / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "required"),
    [
        ("requirements.txt", PROJECT["dependencies"]),
        (
            "requirements-dev.txt",
            [line for name in ("megatron", "mlflow", "trackio", "test", "dev") for line in EXTRAS[name]]
            + PROJECT["dependencies"],
        ),
        ("engines/vllm-cpu.txt", [*PROJECT["dependencies"], *EXTRAS["test"]]),
        ("engines/vllm-cpu.txt", (DEPLOY / "engines/vllm-cpu.in").read_text(encoding="utf-8").split("\n")),
        ("engines/sglang-cpu.txt", (DEPLOY / "engines/sglang-cpu.in").read_text(encoding="utf-8").split("\n")),
        ("agents/clients.txt", (DEPLOY / "agents/clients.in").read_text(encoding="utf-8").split("\n")),
    ],
)
def test_what_is_asked_for_is_listed(path: str, required: list[str]) -> None:
    """Where it is not, `make lock` has been forgotten."""
    asked = [line for line in required if line and not line.startswith("#")]
    assert _lacking(_parsed(asked), _listed(path)) == []


def test_images_hold_what_their_packages_require_and_nothing_else() -> None:
    """As far as the listed version of a package is the one that is installed here, and says what it requires."""
    listed = _listed("requirements.txt")
    rest, seen, complete = [*_parsed(PROJECT["dependencies"]), *_parsed(_required_by_torch())], set(), True
    while rest:
        requirement = rest.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            installed = distribution(name)
            if installed.version != listed[name]:
                complete = False
                continue
            parsed = [Requirement(line) for line in installed.requires or []]
            wanted = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": extra})]
            assert _lacking(wanted, listed) == [], f"required by {name}"
            rest += wanted
    if complete:
        assert set(listed) == {name for name, _ in seen}, "listed, and required by none"


def _required_by_torch() -> list[str]:
    """As the lists were told; CUDA builds pin their own libraries."""
    settings = tomllib.loads((DEPLOY / "uv.toml").read_text(encoding="utf-8"))
    [torch] = settings["dependency-metadata"]
    assert f"torch=={torch['version']}" in settings["override-dependencies"]
    required: list[str] = torch["requires-dist"]
    return required


def test_lists_know_what_torch_requires() -> None:
    said = {str(Requirement(line)) for line in _required_by_torch()}
    parsed = [Requirement(line) for line in requires("torch") or [] if "extra ==" not in line]
    assert {str(item) for item in parsed if not re.match(r"nvidia-|cuda-|triton", item.name)} == said


def test_versions_of_torch_agree() -> None:
    settings = tomllib.loads((DEPLOY / "uv.toml").read_text(encoding="utf-8"))
    [version] = [line for line in settings["override-dependencies"] if line.startswith("torch")]
    assert re.findall(r"^TORCH \?= (.*)$", MAKEFILE, re.MULTILINE) == [version]
    assert set(re.findall(r"^ARG TORCH=(.*)$", DOCKERFILE, re.MULTILINE)) == {version}


def test_the_development_list_is_what_is_installed_here() -> None:
    """So the tests speak for what the lists name; where this fails, `make setup` installs it."""
    listed = _listed("requirements-dev.txt")
    shared = _listed("requirements.txt")
    assert {name: listed[name] for name in shared} == shared, "images run what the tests ran with"
    assert {name: distribution(name).version for name in listed} == listed


def test_images_and_environments_install_the_lists_and_nothing_else() -> None:
    installed = re.findall(r"pip install (.*?)(?: \\| ;;.*)?$", DOCKERFILE, re.MULTILINE)
    torch, listed = '${TORCH_OPTIONS} "${TORCH}"', "--no-deps --require-hashes --only-binary :all: -r "
    assert installed.count(torch) == 2
    # setuptools, which builds the package, is listed too.
    assert installed.count("--no-deps --no-build-isolation /source") == 1
    paths = sorted(line.removeprefix(listed) for line in installed if line.startswith(listed))
    assert paths == ["/engines/sglang-cpu.txt", "/engines/vllm-cpu.txt", "/requirements.txt"]
    # On CUDA the engines bring torch along.
    stock = sorted(line for line in installed if line.endswith("-cuda.txt"))
    assert stock == ["-r /engines/sglang-cuda.txt", "-r /engines/vllm-cuda.txt"]
    assert len(installed) == DOCKERFILE.count("pip install") == 2 + 1 + 3 + 2
    assert "LISTED := -m pip install --quiet --no-deps --require-hashes -r\n" in MAKEFILE
    for path in LISTS[1:]:
        assert re.search(rf"\$\(LISTED\) deploy/{path}\n", MAKEFILE)
