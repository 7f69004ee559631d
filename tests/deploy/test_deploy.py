"""The guides of deployment name only commands, options and keys that exist."""

from __future__ import annotations

import re

import yaml

from rollmesh.mesh.config import Config, load_config
from tests.deploy.containers import DEPLOY, overrides_of, settings
from tests.repository import REPOSITORY


def test_readme_names_only_commands_that_exist() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"(?:\brollmesh|exec buffer mesh) ((?:status|ledger|generator)\b[^\n`#]*)", text)
    found += re.findall(r"^rollmesh ((?:buffer|reward|learner) [^\n]*)", text, re.MULTILINE)
    assert len(found) == 6
    for line in found:
        overrides_of(line.split())


def test_the_page_on_containers_names_only_commands_and_variables_that_exist() -> None:
    text = (REPOSITORY / "docs" / "containers.md").read_text(encoding="utf-8")
    found = re.findall(r"^after (.*)$", text, re.MULTILINE)
    found += re.findall(r"--entrypoint rollmesh setup (.*)$", text, re.MULTILINE)
    assert len(found) == 4
    for line in found:
        overrides_of(line.split())
    known = {*settings(), "DOCKER_BUILDKIT"}
    assert set(re.findall(r"\b([A-Z]+_[A-Z_]+)=", text)) <= known


def test_security_page_shows_commands_and_settings_that_exist() -> None:
    text = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^rollmesh ((?:[^#&\n])+)", text, re.MULTILINE)
    assert len(commands) == 8
    for line in commands:
        overrides_of(line.split())
    [settings_shown] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    Config.model_validate(
        load_config(REPOSITORY / "examples" / "demo" / "demo.yaml").model_dump() | yaml.safe_load(settings_shown)
    )
