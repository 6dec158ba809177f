"""Which pods are started with certificates."""

from dataclasses import replace
from typing import Any

import pytest

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.launch import EngineLaunch, engine_launch
from specserve_operator.core.names import Pool
from specserve_operator.core.problems import find_problems
from specserve_operator.render.engine import render_engine_pod
from tests.unit.core.builders import CONFIG, make_service

SERVER = "specserve-operator.specserve.svc:9443"
ISSUING = replace(CONFIG, identity_server=SERVER)
AUTOMATIC, DISABLED = {"tls": "Automatic"}, {"tls": "Disabled"}


def service_with(**spec: Any) -> SpeculativeService:
    return make_service(**{"prefill": {}, **spec})


def launch(config: OperatorConfig, pool: Pool = Pool.DECODE, **spec: Any) -> EngineLaunch:
    return engine_launch(service_with(**spec), pool, config=config)


def container(found: EngineLaunch) -> dict[str, Any]:
    container: dict[str, Any] = render_engine_pod(found, revision="r1")["containers"][0]
    return container


@pytest.mark.parametrize("pool", [Pool.PREFILL, Pool.DECODE])
def test_pods_are_told_where_they_get_their_certificates(pool: Pool) -> None:
    found = launch(ISSUING, pool, kvTransfer=AUTOMATIC)
    assert found.identity_server == SERVER
    args = container(found)["args"]
    assert args[args.index("--identity-server") + 1] == SERVER


@pytest.mark.parametrize(
    ("config", "transfer"),
    [(ISSUING, DISABLED), (CONFIG, AUTOMATIC), (replace(ISSUING, local=True), AUTOMATIC)],
    ids=["disabled", "nobody issues any", "one machine"],
)
def test_other_pods_know_nothing_of_certificates(config: OperatorConfig, transfer: dict[str, str]) -> None:
    found = launch(config, Pool.PREFILL, kvTransfer=transfer)
    assert found.identity_server is None
    pod = render_engine_pod(found, revision="r1")
    names = {volume["name"] for volume in pod["volumes"]}
    assert not any(name.startswith(("specserve-trust", "specserve-token", "specserve-identity")) for name in names)
    assert {port["name"] for port in pod["containers"][0]["ports"]} == {"http", "control", "kv"}
    assert not any(arg.startswith(("--identity", "--trust", "--https")) for arg in pod["containers"][0]["args"])


def test_pods_with_and_without_certificates_never_pair() -> None:
    secure, plain = launch(ISSUING, kvTransfer=AUTOMATIC), launch(ISSUING, kvTransfer=DISABLED)
    assert secure.target_revision != plain.target_revision
    assert secure.target_revision == launch(ISSUING, Pool.PREFILL, kvTransfer=AUTOMATIC).target_revision
    # Where the service of certificates is does not count: pods that asked elsewhere have the same authorities.
    moved = launch(replace(ISSUING, identity_server="elsewhere.svc:9443"), kvTransfer=AUTOMATIC)
    assert moved.target_revision == secure.target_revision


def test_a_service_with_decode_pods_only_has_certificates_too() -> None:
    """The operator's calls are as much as drain a pod."""
    found = launch(ISSUING, prefill=None, kvTransfer=AUTOMATIC)
    assert found.identity_server == SERVER
    assert launch(CONFIG, prefill=None, kvTransfer=AUTOMATIC).identity_server is None


def test_an_operator_without_certificates_does_not_move_kv_caches_in_the_open_by_itself() -> None:
    (problem,) = find_problems(service_with(kvTransfer=AUTOMATIC), CONFIG)
    assert problem.startswith("spec.kvTransfer.tls: this operator gives pods no certificates")
    assert find_problems(service_with(kvTransfer=AUTOMATIC), ISSUING) == ()
    assert find_problems(service_with(kvTransfer=DISABLED), CONFIG) == ()
    assert find_problems(make_service(kvTransfer=AUTOMATIC), CONFIG) == ()
    assert find_problems(service_with(kvTransfer=AUTOMATIC), replace(CONFIG, local=True)) == ()


def test_keys_stay_in_memory_and_go_with_the_pod() -> None:
    pod = render_engine_pod(launch(ISSUING, kvTransfer=AUTOMATIC), revision="r1")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "specserve-identity")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    directory = pod["containers"][0]["args"][pod["containers"][0]["args"].index("--identity-directory") + 1]
    assert directory.startswith(mounts["specserve-identity"]["mountPath"] + "/")
    assert all(mounts[name]["readOnly"] for name in ("specserve-trust", "specserve-token"))


def test_the_token_is_of_use_to_the_certificate_service_only() -> None:
    pod = render_engine_pod(launch(ISSUING, kvTransfer=AUTOMATIC), revision="r1")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "specserve-token")
    token = {"audience": "specserve.dev/identity", "expirationSeconds": 3600, "path": "token"}
    assert volume["projected"]["sources"] == [{"serviceAccountToken": token}]
    assert pod["automountServiceAccountToken"] is False
