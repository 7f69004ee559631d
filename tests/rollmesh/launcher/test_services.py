"""The command lines and environments of a run's services."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollmesh.launcher.placement.devices import DevicePlan, assign_devices
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.launcher.services import ServiceCatalogue, drain_order, thread_plan
from rollmesh.mesh.config import load_config
from rollmesh.mesh.rpc.held_ports import ENVIRONMENT, HeldPorts
from rollmesh.mesh.runtime.threads import ThreadPlan


def test_each_is_started_at_a_port_that_nobody_else_can_have(tmp_path: Path) -> None:
    settings = ["buffer.fronts=2", "buffer.redis=redis://127.0.0.1:1", f"run.dir={tmp_path}"]
    asked = load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, settings)
    with HeldPorts(asked.network.host) as held:
        catalogue = ServiceCatalogue(
            asked, Path("c.yaml"), ThreadPlan(1, 1, 1), Preparation(DevicePlan()), held, allow_changes=False
        )
        ports = set()
        for spec in (*catalogue.buffer(), *catalogue.further_fronts(), *catalogue.others("host:1")):
            assert ENVIRONMENT.items() <= spec.environment.items()
            first, again = (int(command[command.index("--port") + 1]) for command in map(spec.command, (False, True)))
            assert (first == again) == spec.name.startswith("buffer"), "members know the fronts by their addresses"
            ports |= {first, again}
        assert len(ports) == 2 + 2 * 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((asked.network.host, port))


def test_generators_are_told_whether_they_share_devices_and_have_threads_of_their_side(tmp_path: Path) -> None:
    asked = load_config(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "placement": "hybrid"},
        [f"run.dir={tmp_path}", "learner.ranks=2"],
    )
    plan = ThreadPlan(8, learner=2, generator=4, shared=3)
    with HeldPorts(asked.network.host) as held:
        prepared = Preparation(DevicePlan())
        catalogue = ServiceCatalogue(asked, Path("c.yaml"), plan, prepared, held, allow_changes=False)
        specs = {spec.name: spec for spec in catalogue.others("host:1")}
        commands = {name: spec.command(False) for name, spec in specs.items()}
    assert list(specs) == ["learner", "reward", "generator-0", "shared-0", "shared-1"]
    assert "--own-devices" in commands["generator-0"]
    ids = {name: command[command.index("--member-id") + 1] for name, command in commands.items() if "-0" in name}
    assert ids["generator-0"].startswith("generator-0-"), "found by the name of its log"
    assert ids["shared-0"].startswith("generator-shared-0-"), "of its role"
    assert ids["shared-0"] not in specs["shared-0"].command(True), "each process has an id of its own"
    for name, threads in (("generator-0", "4"), ("shared-0", "3"), ("shared-1", "3")):
        assert specs[name].environment["OMP_NUM_THREADS"] == threads
        assert ("--shares-devices" in commands[name]) == name.startswith("shared")
        assert drain_order(name) == 0


def test_an_evaluator_takes_the_place_of_the_learner(tmp_path: Path) -> None:
    asked = load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, [f"run.dir={tmp_path}"])
    with HeldPorts(asked.network.host) as held:
        plan, prepared = ThreadPlan(1, 1, 1), Preparation(DevicePlan())
        catalogue = ServiceCatalogue(asked, Path("c.yaml"), plan, prepared, held, allow_changes=False)
        evaluator, *others = catalogue.around_evaluator("host:1", tmp_path / "weights", with_log_probs=True)
        bare, *_ = catalogue.around_evaluator("host:1", None, with_log_probs=False)
    assert [spec.name for spec in others] == ["reward", "generator-0"]
    assert (evaluator.name, evaluator.completes_run, drain_order("evaluator")) == ("evaluator", True, 1)
    command = evaluator.command(False)
    assert command[command.index("--weights") + 1] == str(tmp_path / "weights")
    assert "--log-probs" in command
    assert not {"--weights", "--log-probs"} & set(bare.command(True))


def test_roles_apart_have_processes_threads_and_devices_of_their_own(tmp_path: Path) -> None:
    asked = load_config(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algorithm": {"name": "ppo"}},
        [
            f"run.dir={tmp_path}",
            "learner.roles.critic={at: own, ranks: 2}",
            "learner.roles.reference={at: elsewhere}",
        ],
    )
    plan = thread_plan(asked, 6)
    assert plan.learner == 1, "three processes on the learner's half"
    prepared = Preparation(assign_devices(asked, VisibleDevices(tuple("0123"), 4, 4)))
    with HeldPorts(asked.network.host) as held:
        catalogue = ServiceCatalogue(asked, Path("c.yaml"), plan, prepared, held, allow_changes=False)
        specs = {spec.name: spec for spec in catalogue.others("host:1")}
        command = specs["role-critic"].command(False)
    assert "role-reference" not in specs, "started by hand"
    assert [*command][command.index("role") : command.index("role") + 5] == [
        "role",
        "critic",
        "c.yaml",
        "--mesh",
        "host:1",
    ]
    assert specs["role-critic"].answering == ("role-critic-0", "role-critic-1")
    seen = {name: specs[name].environment["CUDA_VISIBLE_DEVICES"] for name in ("learner", "generator-0", "role-critic")}
    assert seen == {"learner": "0", "generator-0": "1", "role-critic": "2,3"}
    assert drain_order("generator-0") < drain_order("learner") < drain_order("role-critic") < drain_order("buffer")
