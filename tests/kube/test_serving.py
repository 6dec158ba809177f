"""Real engines in real pods: from `kubectl apply` to completions, with KV caches that move between nodes."""

import json
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.kube.site import (
    GPU_TAINT_KEY,
    ROOT,
    SYSTEM_NAMESPACE,
    Object,
    Service,
    Site,
    eventually,
    on_node_pool,
    tolerant,
)

pytestmark = pytest.mark.kube

MODELS = ROOT / "examples" / "tiny" / "models"
PACKAGES = ROOT / ".venv" / "lib" / "python3.11" / "site-packages"
PROMPT = "The old captain of the ship said that " * 12


def engine_template(pool: str) -> Object:
    """The engine itself, gigabytes of packages, comes from this machine's own environment, read-only."""
    mounts = [
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "packages", "mountPath": "/opt/packages", "readOnly": True},
    ]
    container = {
        "name": "engine",
        "env": [{"name": "PYTHONPATH", "value": "/opt/packages"}],
        "resources": {"limits": {GPU_TAINT_KEY: "1", "cpu": "1", "memory": "4Gi"}},
        "volumeMounts": mounts,
    }
    volumes = [
        {"name": "models", "hostPath": {"path": str(MODELS)}},
        {"name": "packages", "hostPath": {"path": str(PACKAGES)}},
    ]
    return on_node_pool(pool, containers=[container], volumes=volumes)


def tiny_spec() -> Object:
    args = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]
    return {
        "model": {"uri": "file:///models/target"},
        "engine": {"args": [*args, "--max-num-seqs", "16", "--kv-cache-memory-bytes", "268435456"]},
        "speculation": {
            "draft": {"method": "DraftModel", "uri": "file:///models/draft"},
            "length": {"policy": "DSDE", "cap": "Mean", "max": 4},
        },
        "kvTransfer": {"connectTimeoutMilliseconds": 3000},
        "prefill": {"replicas": 1, "drainTimeoutSeconds": 10, "template": engine_template("prefill")},
        "decode": {"replicas": 1, "drainTimeoutSeconds": 10, "template": engine_template("decode")},
        "gateway": {"template": tolerant()},
    }


@pytest.fixture(scope="module")
def tiny(site: Site) -> Iterator[Service]:
    site.kubectl("create", "namespace", "serving")
    service = Service(site, "serving", "tiny")
    service.apply(tiny_spec())
    service.wait_ready()
    yield service
    site.kubectl("delete", "namespace", "serving", "--wait", "--timeout=180s")


def test_a_completion_is_answered_with_kv_from_another_node(tiny: Service) -> None:
    before = tiny.status()["kvTransfer"]["transfers"]

    text = tiny.complete(PROMPT)

    assert text
    nodes = {pool: tiny.pods(pool)[0]["spec"]["nodeName"] for pool in ("prefill", "decode")}
    assert nodes["prefill"] != nodes["decode"]
    moved = eventually(
        lambda: tiny.status()["kvTransfer"]["transfers"] > before and tiny.status()["kvTransfer"],
        timeout_seconds=30,
        what="the transfer is in the status",
        show=tiny.explain,
    )
    assert moved["fallbacks"] == 0
    assert moved["bytes"] > 0
    assert tiny.condition("KVTransferReady")["reason"] == "Transferring"


def test_describe_tells_a_person_how_the_service_is(tiny: Service) -> None:
    described = tiny.kubectl("describe", "spsvc", "tiny")

    for words in ("AllPoolsReady", "RolloutComplete", "ServiceReady", "http://tiny-gateway.serving.svc"):
        assert words in described, described
    row = tiny.kubectl("get", "spsvc", "tiny").splitlines()[1].split()
    assert row[:4] == ["tiny", "True", "1/1", "1/1"]


def test_the_plain_port_of_a_prefill_pod_takes_no_prompts(tiny: Service) -> None:
    address = tiny.pods("prefill")[0]["status"]["podIP"]

    answer = httpx.post(f"http://{address}:8000/v1/completions", json={"prompt": PROMPT}, timeout=30, trust_env=False)

    assert answer.status_code == 403
    assert httpx.get(f"http://{address}:8000/ready", timeout=30, trust_env=False).status_code == 200


def test_nobody_manages_the_router_or_drains_a_pod_over_the_network(tiny: Service) -> None:
    bad = "http://10.255.255.1:8000"
    for method, path in (("POST", f"/add_worker?url={bad}"), ("GET", "/list_workers"), ("GET", "/drain")):
        assert httpx.request(method, f"{tiny.url()}{path}", timeout=30, trust_env=False).status_code == 404
    address = tiny.pods("decode")[0]["status"]["podIP"]
    # Its network policy may keep this machine out, and then there is no answer at all.
    with suppress(httpx.TransportError):
        assert httpx.get(f"http://{address}:8000/drain", timeout=5, trust_env=False).status_code == 404
    assert tiny.complete(PROMPT)


def test_certificates_are_renewed_without_a_restart_and_transfers_go_on(tiny: Service, site: Site) -> None:
    def issued(pod: Object) -> int:
        log = site.kubectl("-n", SYSTEM_NAMESPACE, "logs", "deploy/specserve-operator", "--tail=-1")
        return log.count(f"/pod/{pod['metadata']['uid']} until")

    pods = [*tiny.pods("prefill"), *tiny.pods("decode")]
    before = [issued(pod) for pod in pods]

    eventually(
        lambda: all(issued(pod) > count for pod, count in zip(pods, before, strict=True)),
        timeout_seconds=180,
        what="every pod has got a new certificate",
    )
    fallbacks = tiny.status()["kvTransfer"]["fallbacks"]
    transfers = tiny.status()["kvTransfer"]["transfers"]
    tiny.complete("Something that no cache has seen before. " * 10)
    eventually(
        lambda: tiny.status()["kvTransfer"]["transfers"] > transfers,
        timeout_seconds=30,
        what="a transfer with the new certificates",
        show=tiny.explain,
    )
    assert tiny.status()["kvTransfer"]["fallbacks"] == fallbacks
    now = [*tiny.pods("prefill"), *tiny.pods("decode")]
    assert [p["metadata"]["uid"] for p in now] == [p["metadata"]["uid"] for p in pods]
    assert sum(c["restartCount"] for p in now for c in p["status"]["containerStatuses"]) == 0


def test_speculation_is_switched_off_and_on_without_restarting_pods(tiny: Service) -> None:
    uid = tiny.pods("decode")[0]["metadata"]["uid"]
    expected = tiny.complete(PROMPT)

    tiny.patch({"speculation": {"mode": "Never"}})
    eventually(
        lambda: tiny.status()["speculation"]["state"] == "Off", timeout_seconds=60, what="off", show=tiny.explain
    )
    assert tiny.complete(PROMPT) == expected
    tiny.patch({"speculation": {"mode": "Auto"}})
    eventually(lambda: tiny.status()["speculation"]["state"] == "On", timeout_seconds=60, what="on", show=tiny.explain)

    assert tiny.complete(PROMPT) == expected
    assert tiny.pods("decode")[0]["metadata"]["uid"] == uid


def test_without_the_operator_restarted_pods_serve(tiny: Service, site: Site) -> None:
    """A container that ends, and a pod that is deleted: Kubernetes brings them back, and they find all they need."""
    expected = tiny.complete(PROMPT)
    site.kubectl("-n", SYSTEM_NAMESPACE, "scale", "deploy/specserve-operator", "--replicas=0")
    site.kubectl(
        "-n", SYSTEM_NAMESPACE, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=specserve-operator"
    )
    try:
        prefill = tiny.pods("prefill")[0]
        tiny.kubectl("exec", prefill["metadata"]["name"], "--", "python", "-c", "import os; os.kill(1, 15)")
        tiny.kubectl("delete", "pod", tiny.pods("decode")[0]["metadata"]["name"], "--wait=false")

        def both_ready() -> bool:
            pods = [*tiny.pods("prefill"), *tiny.pods("decode")]
            ready = [c["ready"] for p in pods for c in p["status"].get("containerStatuses", ())]
            restarts = tiny.pods("prefill")[0]["status"]["containerStatuses"][0]["restartCount"]
            return len(ready) == 2 and all(ready) and restarts == 1

        eventually(both_ready, timeout_seconds=400, what="both pods are ready again", show=tiny.explain)
        answer = eventually(
            lambda: _try_to_complete(tiny), timeout_seconds=60, what="the gateway knows the new pod", show=tiny.explain
        )
        assert answer == expected
        address = tiny.pods("decode")[0]["status"]["podIP"]
        metrics = httpx.get(f"http://{address}:8000/metrics", timeout=30, trust_env=False).text
        drafted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
        assert float(drafted[0].split()[-1]) > 0, "the new pod has found neither policy nor draft"
    finally:
        site.kubectl("-n", SYSTEM_NAMESPACE, "scale", "deploy/specserve-operator", "--replicas=1")
    tiny.wait_ready()


def _try_to_complete(service: Service) -> str:
    try:
        return service.complete(PROMPT)
    except (AssertionError, httpx.HTTPError):
        return ""


def test_deleting_the_service_removes_all_that_belongs_to_it(tiny: Service, site: Site) -> None:
    kinds = "deployments,replicasets,pods,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"
    selector = "specserve.dev/service=tiny"
    assert site.items("-n", "serving", kinds, "-l", selector)

    tiny.kubectl("delete", "spsvc", "tiny", "--wait")

    eventually(
        lambda: not site.items("-n", "serving", f"{kinds},controllerrevisions,pdb,endpointslices", "-l", selector),
        timeout_seconds=90,
        what="nothing is left",
        show=lambda: json.dumps(
            [f"{o['kind']}/{o['metadata']['name']}" for o in site.items("-n", "serving", kinds, "-l", selector)]
        ),
    )
