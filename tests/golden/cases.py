"""Services whose rendered objects are kept as files, so that every change of what is rendered is seen in review.

    python -m tests.golden.cases      writes the files anew; `git diff` then shows what changed

A pod template that changes here under the same revision means that `RENDER_VERSION` in core/revision.py must be raised.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest
from specserve_operator.core.plan import plan
from specserve_operator.render import render, render_seeds
from tests.unit.core.builders import CONFIG, make_service, make_snapshot

FOLDER = Path(__file__).parent
REGENERATE = "python -m tests.golden.cases"

_DRAFT = {"method": "DraftModel", "uri": "hf://acme/draft-0.5b@0123abc"}
_USER_TEMPLATE: Mapping[str, Any] = {
    "metadata": {
        "labels": {"team": "search", "specserve.dev/pool": "mine"},
        "annotations": {"prometheus.io/scrape": "true"},
    },
    "spec": {
        "nodeSelector": {"gpu": "h100"},
        "runtimeClassName": "nvidia",
        "priorityClassName": "serving",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "imagePullSecrets": [{"name": "pull"}],
        "containers": [
            {
                "name": "engine",
                "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "80Gi"}},
                "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "POD_IP", "value": "1.2.3.4"}],
                "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                "livenessProbe": {"failureThreshold": 60},
            },
            {"name": "sidecar", "image": "registry.test/sidecar:1"},
        ],
        "volumes": [
            {"name": "extra", "emptyDir": {}},
            {"name": "cache", "persistentVolumeClaim": {"claimName": "kernels"}},
        ],
    },
}

CASES: Mapping[str, SpeculativeService] = {
    # model.uri alone is a valid service.
    "minimal": make_service(),
    "full": make_service(
        generation=7,
        model={"uri": "hf://acme/coder-7b@main", "name": "acme/coder", "secretName": "hub"},
        engine={"image": "registry.test/custom:2", "args": ["--max-model-len", "8192"]},
        objectives={"timeToFirstToken": [{"percentile": 90, "milliseconds": 500}]},
        speculation={
            "mode": "Always",
            "draft": _DRAFT,
            "length": {"policy": "Static", "tokens": 3, "min": 1, "max": 6},
        },
        kvTransfer={
            "connectTimeoutMilliseconds": 250,
            "stallTimeoutMilliseconds": 2000,
            "leaseSeconds": 10,
            "onFailure": "Fail",
        },
        prefill={"replicas": 2, "drainTimeoutSeconds": 60, "args": ["--max-num-batched-tokens", "16384"]},
        decode={"replicas": 4, "drainTimeoutSeconds": 300, "args": ["--max-num-seqs", "64"]},
        gateway={"replicas": 2, "port": 8080},
        rollout={"maxUnavailable": 1, "maxSurge": 0, "minReadySeconds": 30, "progressDeadlineSeconds": 600},
    ),
    "aggregated": make_service(speculation={"draft": _DRAFT}, decode={"replicas": 2}),
    "without-speculation": make_service(prefill={}, decode={"replicas": 1}),
    "scaled": make_service(
        speculation={"draft": _DRAFT, "mode": "Never"},
        prefill={"scaling": {"mode": "Auto", "minReplicas": 2, "maxReplicas": 2}},
        decode={"scaling": {"mode": "External", "minReplicas": 3, "maxReplicas": 3}},
    ),
    "user-template": make_service(
        prefill={"template": {"spec": {"nodeSelector": {"gpu": "l40s"}}}},
        decode={"template": _USER_TEMPLATE},
        gateway={"template": {"spec": {"containers": [{"name": "gateway", "resources": {"requests": {"cpu": "1"}}}]}}},
    ),
    "claim": make_service(
        model={"uri": "pvc://models/coder/7b"},
        speculation={"draft": {"method": "DraftModel", "uri": "pvc://models/coder/draft"}},
        prefill={},
    ),
    "certified": make_service(speculation={"draft": _DRAFT}, prefill={}, kvTransfer={"tls": "Automatic"}),
    "monitored": make_service(prefill={}),
    "open": make_service(prefill={}),
}
# Settings of the operator, where they are not the usual ones.
CONFIGS: Mapping[str, OperatorConfig] = {
    "certified": replace(
        CONFIG,
        operator_namespace="specserve",
        identity_server="specserve-operator.specserve.svc:9443",
        trust_bundle="the authorities, as PEM\n",
    ),
    "monitored": replace(CONFIG, pod_monitors=True, operator_namespace="specserve"),
    "open": replace(CONFIG, network_policies=False),
}


def render_case(name: str) -> list[Manifest]:
    """What is rendered for a new service in an empty namespace, in the order of application."""
    plan_ = plan(make_snapshot(CASES[name], config=CONFIGS.get(name, CONFIG)))
    return [*render_seeds(plan_), *render(plan_)]


def golden_text(name: str) -> str:
    """The content of the case's file. A record's pod templates are left out where they are those of the workloads."""
    objects = render_case(name)
    templates = [o["spec"]["template"] for o in objects if o["kind"] == "Deployment"]
    return yaml.safe_dump_all([_without_known(obj, templates) for obj in objects], sort_keys=False, width=110)


def _without_known(obj: Manifest, templates: list[Manifest]) -> Manifest:
    if obj["kind"] != "ControllerRevision":
        return obj
    pools = {
        name: {**pin, "template": "that of the Deployment"} if pin["template"] in templates else pin
        for name, pin in obj["data"]["pools"].items()
    }
    return {**obj, "data": {**obj["data"], "pools": pools}}


def golden_file(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def main() -> None:
    """Writes every file."""
    for name in CASES:
        golden_file(name).write_text(golden_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
