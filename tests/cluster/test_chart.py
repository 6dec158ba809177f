"""The chart on a real API server: install, upgrade, uninstall and install again. Nothing runs pods."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.kube.control_plane import ControlPlane
from hack.kube.errors import KubectlError
from hack.kube.waiting import wait_until
from specserve_operator.core.names import Pool, object_labels
from tests.chart.rendering import CHART, HelmError, Manifest, Release, of_kind, operator_pod, render, run_helm

NAMESPACE = "llm-system"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:specserve-operator"
CA = "Y2E="  # "ca"
SERVICES = "speculativeservices.specserve.dev"


@dataclass(frozen=True, slots=True)
class Cluster:
    """An API server, and at most one release of the chart, in a namespace that admits only restricted pods."""

    plane: ControlPlane

    def helm(self, *arguments: str, values: dict[str, Any] | None = None) -> str:
        return run_helm(
            *arguments, f"--namespace={NAMESPACE}", stdin=json.dumps(values or {}), kubeconfig=self.plane.kubeconfig
        )

    def revision(self) -> int:
        """Of the release: 1 if it was never upgraded, 0 if there is none."""
        found = json.loads(self.helm("list", "--output=json"))
        return int(found[0]["revision"]) if found else 0

    def has_default_release(self) -> bool:
        return self.revision() == 1 and not json.loads(self.helm("get", "values", "specserve", "--output=json"))

    def install(self, *arguments: str, chart: Path = CHART, values: dict[str, Any] | None = None) -> str:
        return self.helm("install", "specserve", str(chart), "--values=-", *arguments, values=values)

    def upgrade(self, values: dict[str, Any] | None = None) -> str:
        return self.helm("upgrade", "specserve", str(CHART), "--values=-", values=values)

    def clear(self) -> None:
        """Removes the release, its CA and all services. CRDs stay: the next release of the same name takes them."""
        if self.revision():
            self.helm("uninstall", "specserve")
        if self.plane.kubectl("get", "crd", "-o", "name"):
            self.plane.kubectl("delete", SERVICES, "--all", "-n", NAMESPACE)
        self.plane.kubectl("delete", "secret", "--all", "-n", NAMESPACE)

    def get(self, *arguments: str) -> Manifest:
        found: Manifest = json.loads(self.plane.kubectl("get", *arguments, "-n", NAMESPACE, "-o", "json"))
        return found

    def may(self, user: str, verb: str, resource: str, *, namespace: str = NAMESPACE, subresource: str = "") -> bool:
        """Whether RBAC lets a user, or a `group:...`, do it. `resource`: its full name, or also `resource/name`."""
        who = ["--as=someone", f"--as-group={user[6:]}"] if user.startswith("group:") else [f"--as={user}"]
        try:
            self.plane.kubectl(
                "auth", "can-i", verb, resource, f"--subresource={subresource}", "-n", namespace, *who, "--quiet"
            )
        except KubectlError as error:
            if error.stderr:
                raise
            return False
        return True


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), controllers=True) as started:
        started.kubectl("create", "namespace", NAMESPACE)
        started.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        yield started


@pytest.fixture
def cluster(plane: ControlPlane) -> Cluster:
    """Without a release."""
    empty = Cluster(plane)
    empty.clear()
    return empty


@pytest.fixture
def installed(plane: ControlPlane) -> Cluster:
    """With a release of default values, which tests that follow each other share: they do not change it."""
    shared = Cluster(plane)
    if not shared.has_default_release():
        shared.clear()
        shared.install()
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all")
    return shared


def _services(cluster: Cluster) -> Sequence[str]:
    items = cluster.get("speculativeservices")["items"]
    return [item["metadata"]["name"] for item in items]


def test_a_dry_run_on_the_server_finds_nothing_wrong(cluster: Cluster) -> None:
    notes = cluster.install("--dry-run=server")
    assert "STATUS: pending-install" in notes
    assert cluster.revision() == 0


def test_the_notes_name_commands_that_work(installed: Cluster) -> None:
    notes = installed.helm("get", "notes", "specserve")
    assert "kubectl -n llm-system rollout status deployment/specserve-operator" in notes
    example = notes.split("apply -f - <<'EOF'\n")[1].split("   EOF")[0]
    assert example.replace("\n   ", "\n").strip() == (CHART / "files" / "example.yaml").read_text().strip()
    installed.plane.kubectl("apply", "--dry-run=server", "-n", NAMESPACE, "-f", "-", stdin=example)
    installed.plane.kubectl("get", "spsvc", "-n", NAMESPACE)


def test_a_namespace_for_restricted_pods_admits_the_operator_and_the_test(plane: ControlPlane) -> None:
    objects = render(Release(namespace=NAMESPACE))
    metadata = {"name": "operator", "namespace": NAMESPACE}
    spec = operator_pod(objects)["spec"] | {"serviceAccountName": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    for manifest in (pod, *of_kind(objects, "Pod")):
        plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))
    spec["hostNetwork"] = True
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def _apply_as_operator(cluster: Cluster, manifest: Manifest) -> None:
    arguments = ("apply", "--server-side", "--field-manager=specserve", f"--as={OPERATOR}", "-f", "-")
    cluster.plane.kubectl(*arguments, stdin=json.dumps(manifest))


def _gateway_role(resources: Sequence[str]) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "gateway", "namespace": "default", "labels": object_labels("coder", Pool.GATEWAY)},
        "rules": [{"apiGroups": [""], "resources": list(resources), "verbs": ["get", "list", "watch"]}],
    }


def test_the_operator_hands_out_to_gateways_what_it_has_and_no_more(installed: Cluster) -> None:
    _apply_as_operator(installed, _gateway_role(["pods"]))
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        _apply_as_operator(installed, _gateway_role(["pods", "secrets"]))


def test_the_operator_reaches_no_secret_but_the_one_with_its_ca(installed: Cluster) -> None:
    assert installed.may(OPERATOR, "patch", "secret/specserve-operator-identity")
    assert not installed.may(OPERATOR, "get", "secret/other")
    assert not installed.may(OPERATOR, "list", "secrets")
    assert not installed.may(OPERATOR, "get", "secret/specserve-operator-identity", namespace="default")
    assert installed.may(OPERATOR, "create", "deployments.apps", namespace="default")


def test_an_operator_of_one_namespace_can_do_nothing_elsewhere(cluster: Cluster) -> None:
    cluster.install(values={"watch": {"namespaces": [NAMESPACE]}, "rbac": {"aggregate": False}})
    assert cluster.may(OPERATOR, "create", "deployments.apps")
    assert not cluster.may(OPERATOR, "list", SERVICES, namespace="default")
    assert not cluster.may(OPERATOR, "list", "pods", namespace="default")


def test_who_may_edit_a_namespace_may_edit_its_services(installed: Cluster) -> None:
    for role in ("view", "edit", "admin"):
        installed.plane.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", f"--group={role}s", "-n", NAMESPACE
        )
    wait_until(lambda: installed.may("group:views", "get", SERVICES), 30, what="the roles are aggregated")
    wait_until(lambda: installed.may("group:admins", "deletecollection", SERVICES), 30, what="the roles are aggregated")
    assert not installed.may("group:views", "patch", SERVICES)
    assert installed.may("group:edits", "patch", SERVICES)
    assert installed.may("group:edits", "patch", "poolscalers.specserve.dev", subresource="scale")
    assert not installed.may("group:edits", "patch", SERVICES, subresource="status")


def test_an_upgrade_and_a_new_installation_keep_the_ca_and_the_services(cluster: Cluster) -> None:
    cluster.install()
    cluster.plane.kubectl("wait", "--for=condition=Established", "crd", "--all")
    example = (CHART / "files" / "example.yaml").read_text()
    cluster.plane.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=example)
    secret = ("secret/specserve-operator-identity", "-n", NAMESPACE)
    cluster.plane.kubectl("patch", *secret, "--type=merge", "-p", json.dumps({"data": {"ca.pem": CA}}))

    cluster.upgrade({"image": {"tag": "2"}})
    assert cluster.get("secret", "specserve-operator-identity")["data"] == {"ca.pem": CA}

    cluster.helm("uninstall", "specserve")
    assert cluster.get("secret", "specserve-operator-identity")["data"] == {"ca.pem": CA}
    assert _services(cluster) == ["coder"]

    cluster.install()
    assert cluster.get("secret", "specserve-operator-identity")["data"] == {"ca.pem": CA}
    assert _services(cluster) == ["coder"]


def test_nothing_else_is_left_after_uninstalling(cluster: Cluster) -> None:
    cluster.install()
    cluster.helm("uninstall", "specserve")
    mine = ("-l", "app.kubernetes.io/instance=specserve", "-A", "-o", "name")
    left = {
        kind: cluster.plane.kubectl("get", kind, *mine).split()
        for kind in (
            "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,clusterroles,clusterrolebindings",
            "secrets",
            "crds",
        )
    }
    assert [len(names) for names in left.values()] == [0, 1, 3]


def test_leader_election_can_be_switched_on_and_off_by_an_upgrade(cluster: Cluster) -> None:
    """The server fills in `rollingUpdate`, and refuses it beside `Recreate`."""
    cluster.install()
    for enabled, strategy in ((True, "RollingUpdate"), (False, "Recreate")):
        cluster.upgrade({"leaderElection": {"enabled": enabled}})
        assert cluster.get("deployment", "specserve-operator")["spec"]["strategy"]["type"] == strategy


def _scaler_fields(cluster: Cluster) -> Manifest:
    """Fields of a PoolScaler's spec, as the API server knows them."""
    (version,) = cluster.get("crd", "poolscalers.specserve.dev")["spec"]["versions"]
    fields: Manifest = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return fields


def test_an_upgrade_brings_new_definitions_with_it(cluster: Cluster, tmp_path: Path) -> None:
    older = tmp_path / "specserve"
    shutil.copytree(CHART, older)
    path = older / "files" / "crds" / "specserve.dev_poolscalers.yaml"
    crd = yaml.safe_load(path.read_text())
    (version,) = crd["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["replicas"]["maximum"] = 5
    fields["dropped"] = {"type": "string"}
    path.write_text(yaml.safe_dump(crd))

    cluster.install(chart=older)
    assert set(_scaler_fields(cluster)) == {"replicas", "dropped"}
    assert _scaler_fields(cluster)["replicas"]["maximum"] == 5
    cluster.upgrade()

    assert set(_scaler_fields(cluster)) == {"replicas"}
    assert _scaler_fields(cluster)["replicas"]["maximum"] == 10000


def test_definitions_of_another_release_are_taken_over_only_when_asked(cluster: Cluster) -> None:
    cluster.install()
    cluster.helm("uninstall", "specserve")
    cluster.plane.kubectl("annotate", "crd", "--all", "--overwrite", "meta.helm.sh/release-name=another")
    with pytest.raises(HelmError, match="cannot be imported into the current release"):
        cluster.install()
    cluster.install(values={"crds": {"install": False}})
    cluster.helm("uninstall", "specserve")
    cluster.install("--take-ownership")
