"""Releases whose objects are kept as files, so that every change of what is installed is seen in review.

    python -m tests.chart.cases      writes the files anew; `git diff` then shows what changed

Left out are the CRDs and the dashboards, which are files already: other tests compare them.
"""

from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import CHART, PROMETHEUS_OPERATOR, Manifest, Release, render

FOLDER = Path(__file__).parent / "golden"
REGENERATE = "python -m tests.chart.cases"

_EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "llm",
    "imageRegistry": "registry.example.com/llm/",
    "image": {"tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "engine": {"image": {"repository": "engine", "digest": "sha256:" + "0123456789abcdef" * 4}},
    "gateway": {"image": {"repository": "gateway", "tag": "0.1.17"}},
    "replicas": 2,
    "leaderElection": {"enabled": True},
    "logging": {"format": "text", "level": "debug"},
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
    "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "specserve-operator"}},
                }
            ]
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "specserve-operator"}},
        }
    ],
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"example.com/team": "search"},
    "podLabels": {"team": "search"},
    "extraArgs": ["--log-level=warning"],
    "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/extra/ca.pem"}],
    "extraVolumes": [{"name": "extra", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra", "readOnly": True}],
    "serviceAccount": {"name": "robot", "annotations": {"example.com/role": "llm"}},
    "networkPolicy": {
        "apiServer": {"ports": [6443], "cidrs": ["10.0.0.1/32", "10.0.0.2/32"]},
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "extraIngress": [{"from": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 9090}]}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}], "ports": [{"port": 4317}]}],
    },
    "monitoring": {
        "serviceMonitor": {"interval": "15s", "scrapeTimeout": "5s", "labels": {"release": "prometheus"}},
        "prometheusRule": {"labels": {"release": "prometheus"}},
        "dashboards": {"annotations": {"grafana_folder": "LLM"}},
    },
}

CASES: dict[str, Release] = {
    "default": Release(),
    "namespaced": Release(
        {"watch": {"namespaces": ["team-a", "team-b"]}, "rbac": {"aggregate": False}, "crds": {"install": False}},
        name="llm",
        namespace="team-a",
    ),
    "everything": Release(_EVERYTHING, apis=PROMETHEUS_OPERATOR),
}


def golden_file(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def golden_text(name: str) -> str:
    """What the golden file of a case holds."""
    objects = [_shortened(obj) for obj in render(CASES[name]) if obj["kind"] != "CustomResourceDefinition"]
    return yaml.safe_dump_all(objects, sort_keys=False, width=120)


def _shortened(obj: Manifest) -> Manifest:
    if obj["kind"] != "ConfigMap":
        return obj
    files = {path.read_text().strip(): path.name for path in (CHART / "files" / "dashboards").iterdir()}
    return obj | {"data": {key: f"<{files[text.strip()]}>" for key, text in obj["data"].items()}}


def main() -> None:
    """Writes all golden files, and removes those without a case."""
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.yaml"):
        stale.unlink()
    for name in CASES:
        golden_file(name).write_text(golden_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
