"""The manifests: Kubernetes' schemas hold them, and what they name exists."""

import importlib.util
import ipaddress
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tinkermq.actors.scheduler.machines.kubernetes import pod
from tinkermq.schemas.machines import machines_config
from tinkermq.schemas.wire.subjects import SERVICES

from tests.support.configs import REPOSITORY
from tests.support.kubernetes import VERSION

pytestmark = pytest.mark.full

FOLDER = REPOSITORY / "deploy" / "kubernetes"
OVERLAY: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
RESOURCES: list[dict[str, Any]] = [
    one for name in OVERLAY["resources"] for one in yaml.safe_load_all((FOLDER / name).read_text())
]
TEMPLATES = {
    one["metadata"]["name"]: one["spec"]["template"]["spec"]
    for one in RESOURCES
    if "template" in one.get("spec", {})
}
SECRETS = {f"tinkermq-{name}" for name in (*SERVICES, "accounts", "tls", "ca")}
"""Those that docs/clusters.md makes of what `tinkermq init` has written, and of certificates."""
OPEN = {"GOMEMLIMIT"}


def machine() -> dict[str, Any]:
    """Return the pod of a machine as machines.yaml has it."""
    config = machines_config(str(FOLDER / "machines.yaml"))
    return pod(config, config.url, "tmq-00000000-1")


@pytest.mark.parametrize(
    "resource", RESOURCES, ids=lambda one: one["kind"] + one["metadata"]["name"]
)
def test_the_schema_holds_a_manifest(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, VERSION, strict=True)


def test_the_schema_holds_the_pod_of_a_machine() -> None:
    made = machine()
    kubernetes_validate.validate(made, VERSION, strict=True)
    assert made["spec"]["terminationGracePeriodSeconds"] == 120
    assert made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_the_scheduler_may_do_what_it_does_and_no_more() -> None:
    role = next(one for one in RESOURCES if one["kind"] == "Role")
    code = (REPOSITORY / "actors" / "scheduler" / "machines" / "kubernetes.py").read_text()
    calls = set(re.findall(r"api\.(\w+?)_namespaced_pod\(", code))
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]}
    ]
    assert calls == {"create", "read", "list", "delete"}
    assert [name for name, spec in TEMPLATES.items() if "serviceAccountName" in spec] == [
        "scheduler"
    ]


PODS = pytest.mark.parametrize(
    "spec", [*TEMPLATES.values(), machine()["spec"]], ids=[*TEMPLATES, "node"]
)


@PODS
def test_a_pod_has_the_level_restricted_and_nothing_to_spare(spec: dict[str, Any]) -> None:
    """The rules of Kubernetes' Pod Security Standards, and bounds that they do not ask for."""
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)
    kinds = {kind for one in spec["volumes"] for kind in one if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["readOnlyRootFilesystem"]
    assert not {"privileged", "procMount", "seccompProfile"} & context.keys()
    assert "memory" in container["resources"]["limits"]
    assert [one["name"] for one in container["env"] if "KEY" in one["name"]] == []


def test_the_namespace_admits_no_other_pods() -> None:
    (namespace,) = (one for one in RESOURCES if one["kind"] == "Namespace")
    assert namespace["metadata"]["name"] == OVERLAY["namespace"]
    labels = namespace["metadata"]["labels"]
    assert labels == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_a_pod_reaches_only_what_a_policy_names() -> None:
    policies = {
        one["metadata"]["name"]: one["spec"] for one in RESOURCES if one["kind"] == "NetworkPolicy"
    }
    denied = policies.pop("nothing-else")
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in RESOURCES
        if "template" in one.get("spec", {})
    ]
    known = {one["app.kubernetes.io/name"] for one in (*labels, machine()["metadata"]["labels"])}
    admitted = {
        policy["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/name", ""): policy
        for policy in policies.values()
    }
    assert admitted.keys() - {""} <= known
    open_to = {name for name, policy in admitted.items() if "ingress" in policy}
    assert open_to == {"tinkermq-nats", "tinkermq-gateway", "tinkermq-machine"}
    # beyond names and the broker
    reaching = {name for name, policy in admitted.items() if name and "egress" in policy}
    assert reaching == {"tinkermq-scheduler", "tinkermq-machine"}
    outside = admitted["tinkermq-machine"]["egress"][1]["to"][0]["ipBlock"]["except"]
    networks = [ipaddress.ip_network(one) for one in outside]
    for address in ("169.254.169.254", "10.96.0.1", "172.17.0.1", "192.168.1.1", "127.0.0.1"):
        assert any(ipaddress.ip_address(address) in one for one in networks)


@PODS
def test_a_pod_mounts_what_there_is(spec: dict[str, Any]) -> None:
    volumes = {one["name"]: one for one in spec["volumes"]}
    claimed = {one["metadata"]["name"] for one in RESOURCES}
    made = {one["name"] for one in OVERLAY["configMapGenerator"]}
    mounted = {one["name"] for one in spec["containers"][0]["volumeMounts"]}
    assert mounted - {"store"} == volumes.keys()
    for volume in volumes.values():
        assert volume.get("secret", {}).get("secretName", "tinkermq-tls") in SECRETS
        assert volume.get("configMap", {}).get("name", "tinkermq-nats") in made
        assert volume.get("persistentVolumeClaim", {}).get("claimName", "tinkermq-runs") in claimed


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"nats"}))
def test_a_service_starts_a_program_with_options_that_it_has(name: str) -> None:
    container = TEMPLATES[name]["containers"][0]
    program, flag, module, *options = container["command"]
    assert (program, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    words = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert [one for one in options if one.startswith("--") and one not in shown] == []
    named = {one["name"] for one in container["env"]}
    assert [one for one in named - OPEN if one not in _rooms()] == []


def _rooms() -> str:
    rooms = ("schemas", "broker", "envs", "actors", "clients")
    files: Iterator[Path] = (file for one in rooms for file in (REPOSITORY / one).rglob("*.py"))
    return "".join(file.read_text() for file in files if "TINKERMQ_" in file.read_text())


def test_the_page_makes_the_secrets() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    assert [name for name in SECRETS if name not in page and name.split("-")[1] not in page] == []


def test_kustomize_builds_them() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl: apt-get install kubernetes-client, as root")
    words = ["kubectl", "kustomize", str(FOLDER)]
    built = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = list(yaml.safe_load_all(built))
    assert len(found) == len(RESOURCES) + len(OVERLAY["configMapGenerator"])
    for one in found:
        kubernetes_validate.validate(one, VERSION, strict=True)
        assert "tinkermq" in (one["metadata"].get("namespace"), one["metadata"]["name"])
