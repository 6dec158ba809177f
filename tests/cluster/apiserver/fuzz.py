"""Random services: mostly such as a person might write, some that nobody would."""

import random
from collections.abc import Callable
from typing import Any

from tests.cluster.api import Object
from tests.cluster.apiserver.specs import breaks, resource
from tests.cluster.fake_kubelet import GPU, Behaviour, Outcome

Make = Callable[[random.Random], Any]

_BREAKS = [broken for broken in breaks() if broken.kind == "SpeculativeService"]
_SHARE_BROKEN, _SHARE_WILD = 0.15, 0.25

_MODEL_URIS = (
    *("hf://org/model", "hf://org/model@main", "file:///models/a", "pvc://claim/folder", "pvc://claim"),
    *("s3://bucket/model", "oci://registry.test/model:1"),
)
_DRAFT_URIS = ("hf://org/draft", "file:///models/draft", "pvc://claim/draft", "s3://bucket/draft")
_IMAGES = ("engine:1", "engine:2", "registry.test/team/engine@sha256:" + "0" * 64, "x")
_ARGS: tuple[list[str], ...] = (
    ["--seed", "1"],
    ["--max-model-len", "8192"],
    ["--dtype=float32"],
    ["", "-", "--", "ü"],
    [],
)

# Parts of pod templates that the schema lets pass, right and wrong ones.
_TAME_TEMPLATES: tuple[Any, ...] = (
    {},
    {"spec": {}},
    {"metadata": {"labels": {"team": "search"}, "annotations": {"a": "b"}}},
    {"spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "none"}},
    {"spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": "1000m"}, "limits": {GPU: 1}}}]}},
    {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}, {"name": "b", "image": "b:1"}]}},
    {"spec": {"volumes": [{"name": "w", "emptyDir": {}}], "initContainers": [{"name": "i", "image": "i:1"}]}},
    {"spec": {"imagePullSecrets": [{"name": "pull"}], "runtimeClassName": "nvidia", "hostNetwork": False}},
    {"spec": {"containers": [{"name": "engine", "livenessProbe": {"tcpSocket": {"port": 8000}}}]}},
)
_WILD_TEMPLATES: tuple[Any, ...] = (
    {"spec": "text"},
    {"spec": []},
    {"spec": None},
    {"metadata": "text"},
    {"metadata": {"labels": []}},
    {"metadata": {"labels": {"a": 1}}},
    {"metadata": {"name": "mine", "namespace": "other"}},
    {"spec": {"containers": {}}},
    {"spec": {"containers": [None]}},
    {"spec": {"containers": ["engine"]}},
    {"spec": {"containers": [{"image": "nameless:1"}]}},
    {"spec": {"containers": [{"name": "engine", "env": "x"}]}},
    {"spec": {"containers": [{"name": "engine", "env": [{"value": "nameless"}]}]}},
    {"spec": {"containers": [{"name": "engine"}, {"name": "engine"}]}},
    {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "many"}}}]}},
    {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": -1}}}]}},
    {"spec": {"containers": [{"name": "engine", "resources": None, "args": None, "ports": [{"containerPort": "x"}]}]}},
    {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "missing", "mountPath": "/x"}]}]}},
    {"spec": {"containers": [{"name": "engine", "readinessProbe": {"httpGet": {"port": 1}, "exec": {}}}]}},
    {"spec": {"volumes": [{"name": "w", "emptyDir": {}, "hostPath": {"path": "/"}}]}},
    {"spec": {"volumes": [{"name": "specserve-runtime", "emptyDir": {}}]}},
    {"spec": {"restartPolicy": "Never", "nodeName": "node-a"}},
    {"spec": {"terminationGracePeriodSeconds": -5}},
    {"spec": {"unheardOf": {"deep": [1, 2.5, True, None]}}},
    {"unheardOf": 1},
    {"spec": {"containers": [{"name": "x" * 300, "image": "x"}]}},
    {"spec": {"tolerations": "all", "affinity": 5, "securityContext": "none"}},
)


def random_service(rng: random.Random, name: str) -> Object:
    """A service that the API server may or may not take."""
    if rng.random() < _SHARE_BROKEN:
        manifest = rng.choice(_BREAKS).manifest()
        manifest["metadata"]["name"] = name
        return manifest
    spec: Object = {"model": {"uri": rng.choice(_MODEL_URIS)}}
    for field, make in _FIELDS.items():
        if rng.random() < _CHANCES.get(field, 0.5):
            spec[field] = make(rng)
    return resource("SpeculativeService", spec, name=name)


def random_behaviour(rng: random.Random) -> Behaviour:
    """What becomes of pods: mostly they get ready."""
    return Behaviour(rng.choice([*[Outcome.READY] * 6, *Outcome]), "error: --model: no such folder")


def _serving(rng: random.Random) -> Object:
    pool: Object = {}
    match rng.randrange(4):
        case 0:
            pool["replicas"] = rng.randrange(4)
        case 1:
            least, most = rng.randrange(3), rng.randint(1, 3)
            pool["scaling"] = {
                "mode": rng.choice(["Auto", "Advise", "External"]),
                "minReplicas": least,
                "maxReplicas": most,
            }
        case _:
            pool["replicas"] = 1
    if rng.random() < 0.5:
        pool["template"] = _template(rng)
    if rng.random() < 0.3:
        pool["args"] = rng.choice(_ARGS)
    return pool


def _template(rng: random.Random) -> Any:
    return rng.choice(_WILD_TEMPLATES if rng.random() < _SHARE_WILD else _TAME_TEMPLATES)


def _speculation(rng: random.Random) -> Object:
    method = rng.choice(["DraftModel", "DraftModel", "DraftModel", "NGram", "EAGLE3", "Medusa"])
    draft = {"method": method} | ({} if method == "NGram" else {"uri": rng.choice(_DRAFT_URIS)})
    length: Object = {"policy": rng.choice(["DSDE", "Static", "Goodput"]), "max": rng.randint(1, 8)}
    if length["policy"] == "Static" or rng.random() < 0.1:
        length["tokens"] = rng.randrange(9)
    return {
        "draft": draft,
        "mode": rng.choice(["Auto", "Always", "Never"]),
        "length": length,
        "rolloutPercent": rng.choice([0, 50, 100]),
    }


_FIELDS: dict[str, Make] = {
    "engine": lambda rng: {"image": rng.choice(_IMAGES), "args": rng.choice(_ARGS)},
    "speculation": _speculation,
    "kvTransfer": lambda rng: {"tls": "Disabled", "leaseSeconds": rng.randint(1, 600)},
    "prefill": _serving,
    "decode": _serving,
    "gateway": lambda rng: {"replicas": rng.randint(1, 2), "port": rng.randint(1, 65535), "template": _template(rng)},
    "rollout": lambda rng: {"maxSurge": rng.randrange(3), "maxUnavailable": rng.randrange(3)},
    "objectives": lambda rng: {"timePerOutputToken": [{"percentile": rng.randint(50, 99), "milliseconds": 40}]},
    "classes": lambda rng: [{"name": "batch", "priority": rng.randrange(5)}],
    "budget": lambda rng: {"maxGPUs": rng.randint(1, 9)},
}
_CHANCES = {"kvTransfer": 0.9, "classes": 0.05, "budget": 0.05, "speculation": 0.3}
