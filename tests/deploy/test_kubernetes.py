"""The Kubernetes tree: valid for the API, closed as its strictest profile asks, and in agreement with the product."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from deploy.kubernetes import prometheus_rule
from rollmesh.buffer.redis_backend.acl import FRONT_COMMANDS
from rollmesh.cli.app import app
from rollmesh.generators.drain_times import DrainTimes
from rollmesh.launcher.services import _LEARNER_DRAIN_S
from rollmesh.learner.checkpoint.deadlines import LAST_S
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.config import load_config
from tests.repository import REPOSITORY

TREE = REPOSITORY / "deploy" / "kubernetes"
Document = dict[str, Any]
# The oldest that is still maintained by a large cloud, and the newest.
OLDEST, NEWEST = "1.30", "1.37"
# Kinds of other projects, for which there is no schema.
FOREIGN = {"ScaledObject", "PodMonitor", "PrometheusRule"}
ROLES = {"buffer": "Deployment", "reward": "Deployment", "generator": "Deployment", "learner": "StatefulSet"}
# Seconds of a pod's end that are no part of the drain: the signal, and leaving.
MARGIN_S = 3


@cache
def base() -> tuple[Document, ...]:
    """All documents of the base, as they are written."""
    files = [
        path for path in sorted((TREE / "base").glob("*.yaml")) if path.name not in ("kustomization.yaml", "cfg.yaml")
    ]
    return tuple(document for path in files for document in yaml.safe_load_all(path.read_text()))


@cache
def rendered(folder: str) -> tuple[Document, ...]:
    """A folder of the tree, as it is applied."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which renders overlays, is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(TREE / folder)], capture_output=True, text=True, timeout=180, check=True
    )
    return tuple(yaml.safe_load_all(done.stdout))


def one(documents: tuple[Document, ...], kind: str, name: str) -> Document:
    (found,) = [item for item in documents if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def pods(documents: tuple[Document, ...]) -> Iterator[tuple[str, Document]]:
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def container(documents: tuple[Document, ...], role: str) -> Document:
    pod = one(documents, ROLES[role], role)["spec"]["template"]["spec"]
    (found,) = pod["containers"]
    return dict(found)


def parsed(arguments: list[str], config: Path) -> tuple[dict[str, Any], list[str]]:
    """The options of a command line of `rollmesh`, and its overrides; fails where it has no such command or option."""
    command: Any = typer.main.get_command(app)
    rest = [str(config) if item == "/etc/rollmesh/cfg.yaml" else item for item in arguments]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    context = command.make_context(command.name, rest)
    return context.params, context.args


@pytest.mark.parametrize(
    ("folder", "version"), [("base", OLDEST), ("base", NEWEST), ("overlays/demo", OLDEST), ("overlays/gpu", NEWEST)]
)
def test_every_document_is_valid(folder: str, version: str) -> None:
    documents = base() if folder == "base" else rendered(folder)
    autoscaler = yaml.safe_load((TREE / "components" / "hpa" / "autoscaler.yaml").read_text())
    for document in (*documents, autoscaler):
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_the_api_does_not_know_is_found() -> None:
    document = copy.deepcopy(one(base(), "Deployment", "generator"))
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, OLDEST, strict=True)


@pytest.mark.parametrize("folder", ["base", "overlays/demo", "overlays/gpu"])
def test_pods_keep_to_the_restricted_profile(folder: str) -> None:
    """Pod Security Standards, `restricted`, which the namespace enforces; and what it leaves open is closed too."""
    documents = base() if folder == "base" else rendered(folder)
    labels = one(documents, "Namespace", "rollmesh")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    names = set()
    for name, pod in pods(documents):
        names.add(name)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*pod["containers"], *pod.get("initContainers", ())):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in each.get("ports", ()))
            assert each["resources"]["requests"]
            assert each["resources"]["limits"]["memory"]
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "secret", "emptyDir"}, "never of the host"
            assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440
    assert names == {"redis", *ROLES}


@pytest.mark.parametrize("role", ROLES)
def test_commands_options_and_configuration_exist(role: str, tmp_path: Path) -> None:
    spec = container(base(), role)
    assert spec["args"][0] == role
    options, overrides = parsed(spec["args"], TREE / "base" / "cfg.yaml")
    if role != "buffer":
        assert options["mesh"] == "buffer:7000"
    if role == "generator":
        security = {"token_file": options["token_file"], "metrics_key_file": options["metrics_key_file"]}
        network = {"host": options["host"], "advertise": options["advertise"], "metrics_port": options["metrics_port"]}
    else:
        config = load_config(TREE / "base" / "cfg.yaml", overrides)
        security, network = dict(config.security), dict(config.network)
        assert not config.security.allow_insecure
    assert str(security["token_file"]) == "/run/secrets/rollmesh/grant"
    assert str(security["metrics_key_file"]) == "/run/secrets/rollmesh/metrics.key"
    assert (network["host"], network["advertise"], network["metrics_port"]) == ("0.0.0.0", "$(POD_IP)", 9100)
    port = network["port"] if role == "buffer" else options["port"]
    assert {item["name"]: item["containerPort"] for item in spec["ports"]} == {"grpc": port, "metrics": 9100}
    # The kubelet asks the health service, which answers callers without a credential.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert spec[probe]["grpc"] == {"port": port}


def test_the_variables_of_pods_are_those_of_the_cluster_alone() -> None:
    for role in ROLES:
        (variable,) = container(base(), role)["env"]
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.parametrize("folder", ["base", "overlays/gpu"])
def test_the_cluster_waits_for_as_long_as_an_end_in_order_takes(folder: str) -> None:
    documents = base() if folder == "base" else rendered(folder)
    grace = {name: pod["terminationGracePeriodSeconds"] for name, pod in pods(documents)}
    options, _ = parsed(container(documents, "generator")["args"], TREE)
    assert options["drain_s"] + MARGIN_S <= grace["generator"]
    assert DrainTimes.within(options["drain_s"]).running_s > 0
    assert grace["learner"] >= max(_LEARNER_DRAIN_S, LAST_S)


def test_budgets_let_nodes_be_drained() -> None:
    """One pod of each kind may always go, also where there is only one."""
    for name in ROLES:
        spec = one(base(), "PodDisruptionBudget", name)["spec"]
        assert spec["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        assert "minAvailable" not in spec
        assert spec["maxUnavailable"] in (1, "50%")


def test_each_connection_that_the_mesh_needs_is_allowed_on_both_sides_and_no_other() -> None:
    ports = {"redis": 6379, "buffer": 7000, "generator": 7001, "learner": 7002, "reward": 7003}
    allowed: dict[str, set[tuple[str, str, int]]] = {"ingress": set(), "egress": set()}
    for document in base():
        if document["kind"] != "NetworkPolicy" or document["metadata"]["name"] == "closed":
            continue
        own = document["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for side, peers in (("ingress", "from"), ("egress", "to")):
            for rule in document["spec"].get(side, ()):
                for peer in rule[peers]:
                    other = peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
                    pair = (other, own) if side == "ingress" else (own, other)
                    allowed[side] |= {(*pair, port["port"]) for port in rule["ports"]}
    needed = {
        *(("buffer", "redis"), ("buffer", "buffer"), ("reward", "buffer"), ("generator", "buffer")),
        *(("learner", "buffer"), ("generator", "reward"), ("generator", "learner"), ("learner", "generator")),
        # Weights are relayed.
        ("generator", "generator"),
    }
    expected = {(caller, called, ports[called]) for caller, called in needed}
    assert allowed["egress"] == expected
    assert allowed["ingress"] == expected
    closed = one(base(), "NetworkPolicy", "closed")["spec"]
    assert closed["podSelector"] == {}
    assert closed["policyTypes"] == ["Ingress", "Egress"]


def test_secrets_are_made_once_and_each_role_gets_its_own_grant(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.kubernetes.make_secrets", str(tmp_path / "secrets")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180, check=True)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    secrets = list(yaml.safe_load_all(done.stdout))
    for secret in secrets:
        kubernetes_validate.validate(secret, OLDEST, strict=True)
    files = {secret["metadata"]["name"]: secret["stringData"] for secret in secrets}
    for name in ROLES:
        granted = parse_secret(files[name]["grant"].strip(), name).granted
        assert granted is not None
        assert granted[0].role is Role(name)
    assert not any(
        (tmp_path / "secrets" / "authority" / "mesh.token").read_text().strip() in str(content)
        for content in files.values()
    )
    # All that pods mount is there, and all that is there is mounted.
    mounted = {
        volume["secret"]["secretName"] for _, pod in pods(base()) for volume in pod["volumes"] if "secret" in volume
    }
    assert mounted == set(files) - {"metrics"}
    options = " ".join(item for role in ROLES for item in container(base(), role)["args"])
    assert set(re.findall(r"/run/secrets/rollmesh/([\w.]+)", options)) == {"grant", "metrics.key", "redis.password"}
    assert re.findall(r"\+(\S+)", files["redis"]["users.acl"].splitlines()[1]) == list(FRONT_COMMANDS)


def test_the_demo_is_the_demonstration() -> None:
    own = yaml.safe_load((TREE / "overlays" / "demo" / "cfg.yaml").read_text())
    usual = json.dumps(yaml.safe_load((REPOSITORY / "examples" / "demo" / "demo.yaml").read_text()))
    moved = usual.replace("runs/demo-data", "/data/demo").replace('"dir": "runs"', '"dir": "/data/runs"')
    assert own == json.loads(moved)
    (prepare,) = one(rendered("overlays/demo"), "StatefulSet", "learner")["spec"]["template"]["spec"]["initContainers"]
    assert prepare["args"] == ["--out", "/data/demo"]
    assert prepare["image"] == container(rendered("overlays/demo"), "learner")["image"]


def test_generators_follow_the_waiting_clocks() -> None:
    """Both ways to the same number ask for metrics that fronts serve."""
    components = TREE / "components"
    scaled = yaml.safe_load((components / "keda" / "scaled-object.yaml").read_text())
    (trigger,) = scaled["spec"]["triggers"]
    rules = yaml.safe_load((components / "hpa" / "adapter-rules.yaml").read_text())
    (rule,) = rules["rules"]["external"]
    plain = re.sub(r"\s|,<<\.LabelMatchers>>", "", rule["metricsQuery"])
    assert plain == re.sub(r"\s", "", trigger["metadata"]["query"])
    autoscaler = yaml.safe_load((components / "hpa" / "autoscaler.yaml").read_text())
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert metric["external"]["target"]["averageValue"] == trigger["metadata"]["threshold"]
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == autoscaler["spec"]["behavior"]
    served = (REPOSITORY / "docs" / "metrics.md").read_text()
    for name in set(re.findall(r"rollmesh_\w+", plain)):
        assert f"`{name}`" in served
    assert {item["scaleTargetRef"]["name"] for item in (scaled["spec"], autoscaler["spec"])} == {"generator"}


def test_the_operator_gets_the_alerts() -> None:
    """They are one of the resources of `monitoring`, as they stand in deploy/observability."""
    folder = TREE / "components" / "monitoring"
    assert (folder / "rules.yaml").read_text(encoding="utf-8") == prometheus_rule.text(), "run `make docs`"
    assert "rules.yaml" in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
