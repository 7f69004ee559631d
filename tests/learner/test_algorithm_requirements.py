"""A requirement that a configuration cannot provide is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.learner.algorithm_requirements import check_needs
from rollmesh.learner.algorithms.types import ModelRole, Needs
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

CRITIC = ModelRole("critic", kind="value_model", trained=True)


def config(**sections: Any) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


@pytest.mark.parametrize(
    ("needs", "sections", "words"),
    [
        (Needs(group_size=4), {"rollout": {"n": 2}}, "needs at least 4, but rollout.n is 2"),
        (Needs(roles=[CRITIC]), {"learner": {"roles": {"critc": {}}}}, r"learner\.roles\.critc.* \(its roles: critic"),
        (Needs(), {"learner": {"roles": {"reference": {}}}}, "only the actor"),
        (
            Needs(roles=[ModelRole("reference")]),
            {"learner": {"roles": {"reference": {"optimizer": {"lr": 1e-3}}}}},
            r"learner\.roles\.reference\.optimizer: .* does not train",
        ),
        (
            Needs(roles=[CRITIC]),
            {"learner": {"roles": {"critic": {"offload": True}}}},
            r"learner\.roles\.critic\.offload: .* trains this role",
        ),
        (
            Needs(components=["style"]),
            {"reward": {"functions": ["gsm8k", "mine.py:form"]}},
            r"component 'style', .* \(components: form, gsm8k",
        ),
    ],
)
def test_what_cannot_be_provided_is_named(needs: Needs, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_needs(config(**sections), needs)


@pytest.mark.parametrize(
    ("needs", "sections"),
    [
        (Needs(roles=[CRITIC]), {"learner": {"roles": {"critic": {"path": "c", "optimizer": {"lr": 1e-3}}}}}),
        (Needs(components=["form", "gsm8k/part"]), {"reward": {"functions": ["gsm8k", "mine.py:form"]}}),
        # Names that show only with the first group: a function's own parts, other hosts' services.
        (Needs(components=["style"]), {"reward": {"functions": ["mine.py:form"]}}),
        (Needs(components=["style"]), {"reward": {"functions": ["a.py:b", "a.py:c"], "endpoints": ["grpc://h:1"]}}),
    ],
)
def test_what_may_be_provided_passes(needs: Needs, sections: dict[str, Any]) -> None:
    check_needs(config(**sections), needs)
