"""`docs/algorithms.md`: its generated sections are current, its examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from rollmesh.learner.algorithms.docs_reference import fill, read_documentation, sections
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ADVANTAGES, ALGORITHMS, POLICY_LOSSES
from rollmesh.learner.algorithms.types import Rollouts, UpdatePlan
from rollmesh.learner.docs_reference import page
from tests.examples.batches import MemoryBatch, output, train_step
from tests.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "algorithms.md"
EXAMPLES = re.findall(r"```python\n# (\w+\.py)\n(.*?)```\n+```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_is_current() -> None:
    exceptions = json.loads((REPOSITORY / "tests" / "golden" / "exceptions.json").read_text())
    assert PAGE.read_text() == page(PAGE.read_text(), exceptions), "run `make docs`"


def test_every_registered_name_is_documented() -> None:
    found = sections()
    for registry, section in ((ADVANTAGES, "advantages"), (POLICY_LOSSES, "losses"), (ALGORITHMS, "presets")):
        for name in registry.names:
            assert f"\n| `{name}` |" in found[section], name


def test_every_setting_has_a_meaning() -> None:
    """A setting that its docstring forgets leaves an empty cell."""
    found = sections()
    for section in ("settings", "advantages", "losses"):
        forgotten = re.findall(r"^\| `([\w.]+)` \|.*\|  \|$", found[section], re.MULTILINE)
        if section != "settings":  # in the table of names the last column is the source, which an old method lacks
            forgotten = [name for name in forgotten if name not in {*ADVANTAGES.names, *POLICY_LOSSES.names}]
        assert not forgotten, forgotten


def test_docstrings_are_taken_apart() -> None:
    def described() -> None:
        """Its effect, in
        one line.

        y = a * x, arXiv:2402.03300, eq. 3.

        Args:
            a, b: factors that continue.
            c: third (see arXiv:1707.06347).

        Returns:
            d: not a setting.
        """

    about = read_documentation(described)
    assert about.summary == "Its effect, in one line."
    assert about.prose == "Its effect, in\none line.\n\ny = a * x, arXiv:2402.03300, eq. 3."
    assert about.items == {
        "a": "factors that continue.",
        "b": "factors that continue.",
        "c": "third (see arXiv:1707.06347).",
    }
    assert about.sources == ["2402.03300", "1707.06347"]


def test_sections_replace_what_stands_between_their_markers() -> None:
    text = "a\n<!-- generated: x -->\nold\n<!-- end of x -->\nb\n"
    assert fill(text, {"x": "new"}) == "a\n<!-- generated: x -->\nnew\n<!-- end of x -->\nb\n"
    assert fill(fill(text, {"x": "new"}), {"x": "new"}) == fill(text, {"x": "new"})
    with pytest.raises(ValueError, match="y"):
        fill(text, {"y": "new"})


def test_the_page_has_an_advantage_a_loss_and_an_algorithm() -> None:
    assert [name for name, _, _ in EXAMPLES] == ["median_advantage.py", "quadratic_loss.py", "short_reinforce.py"]


@pytest.mark.parametrize(("name", "code", "configuration"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_the_examples_run(
    name: str, code: str, configuration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page has them: file and configuration, a step of it on a batch in memory."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(code)
    section = yaml.safe_load(configuration)["algorithm"]
    settings = {key: value for key, value in section.items() if key != "name"}
    algorithm = load_algorithm(section["name"], settings, UpdatePlan(max_staleness=2, group_size=3))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 3, 1, 2, 2, 3])
    logits = torch.randn(int(lengths.sum()), 5, generator=generator, dtype=torch.float64)
    actions = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    behaviour = output(logits, actions).log_probs
    assert behaviour is not None
    rollouts = Rollouts(
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        lengths=lengths,
        behaviour_log_probs=behaviour,
        staleness=torch.zeros(len(behaviour), dtype=torch.int32),
        truncated=torch.tensor([False, True, False, False, False, False]),
    )
    batch = MemoryBatch(rollouts, {"actor": logits}, actions)
    after = output(train_step(algorithm, batch, 1.0), actions).log_probs
    assert after is not None
    assert (after[:2] > behaviour[:2]).all(), "the only right response of its group becomes more likely"


def test_the_page_names_every_preset_that_users_look_for() -> None:
    wanted = {
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
        "remax",
        "reinforce_plus_plus",
        "ppo",
        "vapo",
        "prime",
    }
    assert wanted | {"opo", "gpg"} <= set(ALGORITHMS.names)
