"""Runs the demo's overlay in a small real cluster on this host: `python -m deploy.kubernetes.try_cluster --help`.

The node is a network namespace with containerd and a kubelet; etcd, API server, controllers and scheduler run next to
it. The demonstration trains in it. Then a generator's pod is deleted, which drains it, and the learner's, which writes
a checkpoint. Needs root, Kubernetes' programs in --programs, Debian's etcd-server, containerd, runc and
containernetworking-plugins, and kubectl.

It was written for 1.20, the newest version that Debian has all sources of. Newer fields are put in its terms: budgets
of `policy/v1beta1`, and probes that only connect.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from deploy.trials import Daemons, balance, ip, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
TREE = REPOSITORY / "deploy" / "kubernetes"
NODE, ADDRESS, PODS, DNS = "rmnode", "10.77.8.1", "10.78.0.0/24", "10.77.8.2"
API = f"https://{ADDRESS}:6443"
ETCD = f"http://{ADDRESS}:2379"
# Users of the volumes' containers.
VOLUMES = {"data-redis-0": 999, "data-learner-0": 10001}

CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/pause:3"
  # A host that is a container may not prefer processes to others when memory ends.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "subnet": PODS, "routes": [{"dst": "0.0.0.0/0"}]},
        }
    ],
}


class Cluster:
    """One node with its control plane.

    Args:
        folder: for all of its files.
        programs: folder of kube-apiserver, kube-controller-manager, kube-scheduler and kubelet.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self._programs = folder, programs
        folder.mkdir(parents=True)
        self._kubeconfig = folder / "kubeconfig"
        self.daemons = Daemons(folder, os.environ)
        # They share the mounts of this host: the kubelet makes volumes, and containerd gives them to containers.
        self._inside = ("nsenter", f"--net=/run/netns/{NODE}")

    def start(self, images: Path) -> None:
        """Starts everything, and waits until the node is ready.

        Args:
            images: archive of the images that pods use.
        """
        folder = self.folder
        self.daemons.add_host(NODE)
        ip("-n", NODE, "link", "add", "node0", "type", "bridge")
        for address in (ADDRESS, DNS):
            ip("-n", NODE, "address", "add", f"{address}/24", "dev", "node0")
        ip("-n", NODE, "link", "set", "node0", "up")
        # Requests to services that have no address there.
        ip("-n", NODE, "route", "add", "default", "dev", "node0")
        self._certificates()
        self._start(
            "etcd", "etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}", f"--listen-peer-urls=http://{ADDRESS}:2380", f"--initial-advertise-peer-urls=http://{ADDRESS}:2380",
            f"--initial-cluster=default=http://{ADDRESS}:2380", "--unsafe-no-fsync",
        )  # fmt: skip
        self._start(
            "kube-apiserver", self._programs / "kube-apiserver", f"--etcd-servers={ETCD}", f"--bind-address={ADDRESS}",
            f"--advertise-address={ADDRESS}", "--service-cluster-ip-range=10.96.0.0/16",
            f"--tls-cert-file={folder}/api.crt", f"--tls-private-key-file={folder}/api.key",
            f"--client-ca-file={folder}/ca.crt",
            f"--service-account-key-file={folder}/api.key", f"--service-account-signing-key-file={folder}/api.key",
            "--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC",
            f"--kubelet-client-certificate={folder}/admin.crt", f"--kubelet-client-key={folder}/admin.key",
            f"--kubelet-certificate-authority={folder}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        wait_for("the API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok")
        self._start(
            "kube-controller-manager", self._programs / "kube-controller-manager", f"--kubeconfig={self._kubeconfig}",
            f"--service-account-private-key-file={folder}/api.key", f"--root-ca-file={folder}/ca.crt",
            "--bind-address=127.0.0.1",
        )  # fmt: skip
        self._start(
            "kube-scheduler",
            self._programs / "kube-scheduler",
            f"--kubeconfig={self._kubeconfig}",
            "--bind-address=127.0.0.1",
        )
        self._start_node(images)
        wait_for("the node", lambda: " Ready " in self.kubectl("get", "nodes", "--no-headers", check=False))

    def kubectl(self, *arguments: str, check: bool = True, given: str | None = None) -> str:
        """The output of kubectl.

        Raises:
            subprocess.CalledProcessError: it has failed, and `check` is set.
        """
        done = subprocess.run(
            [*self._inside, "kubectl", f"--kubeconfig={self._kubeconfig}", *arguments],
            input=given, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, arguments, done.stdout, done.stderr)
        return done.stdout

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Those of a workload that are not about to end."""
        said = self.kubectl(
            "-n", "rollmesh", "get", "pods", "-l", f"app.kubernetes.io/name={name}", "-o", "json", check=False
        )
        found = json.loads(said)["items"] if said else []
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, name: str) -> int:
        """The number of a workload's pods that are ready."""
        return sum(
            condition["status"] == "True"
            for pod in self.pods(name)
            for condition in pod["status"].get("conditions", ())
            if condition["type"] == "Ready"
        )

    def close(self) -> None:
        """Ends everything: containers first."""
        if self._kubeconfig.exists():
            self.kubectl("delete", "namespace", "rollmesh", "--timeout=120s", "--ignore-not-found", check=False)
        self.daemons.close()

    def _start(self, name: str, program: str | Path, *options: str) -> None:
        self.daemons.start(name, *self._inside, str(program), *options)

    def _start_node(self, images: Path) -> None:
        folder = self.folder
        (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder))
        (folder / "cni").mkdir()
        (folder / "cni" / "pods.conflist").write_text(json.dumps(NETWORK))
        self._start("containerd", "containerd", "--config", f"{folder}/containerd.toml")
        wait_for("containerd", (folder / "containerd.sock").exists)
        load = [
            "ctr",
            "--address",
            f"{folder}/containerd.sock",
            "--namespace",
            "k8s.io",
            "images",
            "import",
            str(images),
        ]
        subprocess.run(load, check=True, timeout=600, capture_output=True)
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": f"{folder}/ca.crt"}},
            "tlsCertFile": f"{folder}/api.crt",
            "tlsPrivateKeyFile": f"{folder}/api.key",
            "cgroupDriver": "cgroupfs",
            "clusterDNS": [DNS],
            "clusterDomain": "cluster.local",
            "failSwapOn": False,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }
        (folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
        self._start(
            "kubelet", self._programs / "kubelet", f"--config={folder}/kubelet.yaml",
            f"--kubeconfig={self._kubeconfig}", f"--root-dir={folder}/kubelet", f"--hostname-override={NODE}",
            f"--node-ip={ADDRESS}",
            "--container-runtime=remote", f"--container-runtime-endpoint=unix://{folder}/containerd.sock",
        )  # fmt: skip
        names = [sys.executable, "-m", "deploy.kubernetes.trial_names", DNS, str(self._kubeconfig)]
        self._start("names", *names)

    def _certificates(self) -> None:
        """An authority, the server's certificate, and an administrator's with a kubeconfig."""
        authority_key = rsa.generate_private_key(65537, 2048)
        authority = _certificate("authority", (), authority_key, None, authority_key)
        (self.folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))
        for file, common_name, organization in (("api", NODE, ()), ("admin", "admin", ("system:masters",))):
            key = rsa.generate_private_key(65537, 2048)
            certificate = _certificate(common_name, organization, key, authority, authority_key)
            (self.folder / f"{file}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
            private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
            (self.folder / f"{file}.key").write_bytes(private)
        user = {"client-certificate": f"{self.folder}/admin.crt", "client-key": f"{self.folder}/admin.key"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "trial",
            "contexts": [{"name": "trial", "context": {"cluster": "trial", "user": "admin"}}],
            "clusters": [
                {"name": "trial", "cluster": {"server": API, "certificate-authority": f"{self.folder}/ca.crt"}}
            ],
            "users": [{"name": "admin", "user": user}],
        }
        self._kubeconfig.write_text(yaml.safe_dump(config))


def _certificate(
    name: str,
    organizations: tuple[str, ...],
    key: rsa.RSAPrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: rsa.RSAPrivateKey,
) -> x509.Certificate:
    subject = x509.Name(
        [
            *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, item) for item in organizations),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(NODE), x509.DNSName("kubernetes"), x509.IPAddress(ipaddress.ip_address(ADDRESS))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer is not None else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())


def for_an_old_api(document: dict[str, Any]) -> dict[str, Any]:
    """A document in terms of 1.20."""
    if document["kind"] == "PodDisruptionBudget":
        document["apiVersion"] = "policy/v1beta1"
    if document["kind"] in ("Deployment", "StatefulSet"):
        for container in document["spec"]["template"]["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "grpc" in container.get(probe, {}):
                    container[probe]["tcpSocket"] = container[probe].pop("grpc")
    return document


def volumes(folder: Path) -> list[dict[str, Any]]:
    """A folder of this host for each claim, in the place of a storage class."""
    made = []
    for name, user in VOLUMES.items():
        path = folder / "volumes" / name
        path.mkdir(parents=True)
        os.chown(path, user, user)
        made.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteOnce"],
                    "claimRef": {"namespace": "rollmesh", "name": name},
                    "hostPath": {"path": str(path)},
                },
            }
        )
    return made


def try_it(cluster: Cluster, say: Callable[[str], None]) -> None:
    """The trial itself."""
    folder = cluster.folder
    overlay = subprocess.run(
        ["kubectl", "kustomize", str(TREE / "overlays" / "demo")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    documents = [for_an_old_api(document) for document in yaml.safe_load_all(overlay)]
    secrets = subprocess.run(
        [sys.executable, "-m", "deploy.kubernetes.make_secrets", str(folder / "secrets")],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    cluster.kubectl("create", "namespace", "rollmesh")
    cluster.kubectl("apply", "-f", "-", given=secrets)
    cluster.kubectl("apply", "-f", "-", given=yaml.safe_dump_all([*volumes(folder), *documents]))
    began = time.monotonic()
    say("$ kubectl apply -k deploy/kubernetes/overlays/demo")
    metrics = folder / "volumes" / "data-learner-0" / "runs" / "demo" / "metrics.jsonl"

    def step() -> int:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((int(json.loads(line).get("step", 0)) for line in lines), default=0)

    def trained(until: int) -> None:
        wait_for(f"step {until}", lambda: step() >= until)

    def mesh(command: str) -> str:
        pod = cluster.pods("buffer")[0]["metadata"]["name"]
        return cluster.kubectl(
            "-n", "rollmesh", "exec", pod, "--", "rollmesh", command, "--mesh", "127.0.0.1:7000",
            "--token-file", "/run/secrets/rollmesh/observer.grant",
        )  # fmt: skip

    for name in ("redis", "buffer", "reward", "generator", "learner"):
        wait_for(name, partial(cluster.ready, name))
        say(f"{name} is ready")
    trained(1)
    say(f"first step {time.monotonic() - began:.0f} s after that")
    say(cluster.kubectl("-n", "rollmesh", "get", "pods").rstrip())
    trained(5)
    victim = cluster.pods("generator")[0]["metadata"]["name"]
    asked = time.monotonic()
    cluster.kubectl("-n", "rollmesh", "delete", "pod", victim)
    say(f"kubectl delete pod {victim}: drained and gone after {time.monotonic() - asked:.1f} s, step {step()}")
    wait_for("two generators", lambda: cluster.ready("generator") == 2)
    trained(step() + 5)
    asked = time.monotonic()
    cluster.kubectl("-n", "rollmesh", "delete", "pod", "learner-0")
    last = step()
    say(
        f"kubectl delete pod learner-0: checkpoint written and gone after {time.monotonic() - asked:.1f} s, step {last}"
    )
    trained(last + 5)
    say(f"its successor continues: step {step()}")
    say(balance(mesh("ledger")))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", type=Path, required=True, help="folder of kube-apiserver, kubelet and the others")
    parser.add_argument(
        "--images", type=Path, required=True, help="archive of rollmesh:cpu, redis:7.4-bookworm and pause:3"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:6.0f} s  {text}\n")
        sys.stdout.flush()

    cluster = Cluster(options.out.resolve(), options.programs.resolve())
    try:
        cluster.start(options.images.resolve())
        say(cluster.kubectl("get", "nodes", "-o", "wide").rstrip())
        try_it(cluster, say)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
