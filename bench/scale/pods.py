"""All pods of a cluster without machines, in one process: they get a node and a status, and where they have a control
port, that is served with a certificate of the operator's authority.

    python -m bench.scale.pods --control-plane FOLDER --report FILE

FILE is replaced every second by `Report` as JSON.
"""

import argparse
import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from hack.kube.access import Access
from hack.kube.components import Layout
from specserve_operator.constants import LABEL_POOL, LABEL_REVISION, LABEL_SERVICE, PORT_CONTROL
from specserve_operator.identity.authority import Authority, AuthorityPolicy, load_state
from specserve_operator.identity.certificates import Subject, key_pem, new_key, to_pem
from specserve_operator.identity.names import CERTIFIED_POOLS, PodId
from specserve_workers.identity.channels import ServerTls, operator_rule
from specserve_workers.identity.material import MaterialFiles
from tests.cluster.api import Api, BackgroundLoop, Object
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.mirror import Change, Mirror, is_ready_pod
from tests.cluster.operator_process import NAMESPACE
from tests.fakes.engine.fleet import Fleet
from tests.fakes.engine.fleet_pod import FleetPod

REPORT_SECONDS = 1.0
IDENTITY_SECRET = "specserve-operator-identity"


@dataclass(frozen=True, slots=True)
class Report:
    """`served`: control ports there are. `oldest_call_seconds`: since the pod that waits longest was last asked for
    its statistics; infinite while one never was. `calls`: of all pods so far.
    """

    pods: int
    served: int
    calls: int
    oldest_call_seconds: float


class Calls:
    """When each pod was last asked, as seen once a second."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def report(self, fleet: Fleet, pods: int) -> Report:
        now = time.monotonic()
        for ip, member in fleet.members.items():
            if member.asked != self._seen.get(ip, (0, 0.0))[0]:
                self._seen[ip] = (member.asked, now)
        last = [self._seen[ip][1] if ip in self._seen else float("-inf") for ip in fleet.members]
        calls = sum(member.asked for member in fleet.members.values())
        return Report(pods, len(last), calls, now - min(last, default=now))


def control_pods(pods: Iterable[Object]) -> dict[str, tuple[FleetPod, PodId]]:
    """Those that serve a control port now, by uid."""
    found = {}
    for pod in pods:
        meta, labels = pod["metadata"], pod["metadata"].get("labels") or {}
        pool = labels.get(LABEL_POOL)
        if pool not in CERTIFIED_POOLS or not is_ready_pod(pod):
            continue
        member = FleetPod(
            name=meta["name"], uid=meta["uid"], ip=pod["status"]["podIP"], pool=pool, revision=labels[LABEL_REVISION]
        )
        found[meta["uid"]] = member, PodId(meta["namespace"], labels[LABEL_SERVICE], pool, meta["uid"])
    return found


class Certifier:
    """Gives pods certificates as the operator would, without asking it."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api = api
        self._folder = folder
        self.ids: dict[str, PodId] = {}

    def server_tls(self, pod: FleetPod) -> ServerTls:
        """The certificate of a pod, made when it is first asked for."""
        files = MaterialFiles(self._folder / pod.uid)
        key, pod_id = new_key(), self.ids[pod.uid]
        certificate = self._authority.certify(
            key.public_key(), Subject(uri=pod_id.uri, hosts=pod_id.hosts), datetime.now(UTC)
        )
        files.write_trust(self._authority.trust_bundle.encode())
        files.write_pair(key_pem(key).encode(), to_pem(certificate).encode())
        return ServerTls(files, operator_rule())

    def load(self) -> bool:
        """Reads the operator's authority; false while there is none."""
        secret = self._api.get("secrets", NAMESPACE, IDENTITY_SECRET)
        text = ((secret or {}).get("data") or {}).get("authority.json")
        if text:
            self._authority = Authority(load_state(base64.b64decode(text)), AuthorityPolicy())
        return bool(text)


class Pods:
    """All pods there are."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._pods: dict[str, Object] = {}

    def take(self, change: Change) -> None:
        """Takes in what a watch has seen."""
        uid = change.obj["metadata"]["uid"]
        with self._lock:
            if change.type == "DELETED":
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = change.obj
        self.changed.set()

    def all(self) -> list[Object]:
        with self._lock:
            return list(self._pods.values())


def serve(folder: Path, report_file: Path) -> None:
    """Runs until it is killed."""
    address = (folder / "address").read_text()
    with BackgroundLoop() as background:
        api = Api(Access(Layout(folder, address, etcd_address=address)), background)
        certifier = Certifier(api, folder / "pods")
        fleet, calls, pods = Fleet(port=PORT_CONTROL, tls=certifier.server_tls), Calls(), Pods()
        with Mirror(api, background, plurals=["pods"]) as mirror, FakeKubelet(api, mirror, background):
            mirror.listen(pods.take)
            while not certifier.load():
                time.sleep(REPORT_SECONDS)
            while True:
                if pods.changed.is_set():
                    pods.changed.clear()
                    found = control_pods(pods.all())
                    certifier.ids = {uid: pod_id for uid, (_, pod_id) in found.items()}
                    serving = fleet.set_pods([member for member, _ in found.values()])
                    asyncio.run_coroutine_threadsafe(serving, background.loop).result()
                draft = report_file.with_suffix(".new")
                draft.write_text(json.dumps(asdict(calls.report(fleet, len(pods.all())))))
                draft.replace(report_file)
                time.sleep(REPORT_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.scale.pods", description=__doc__.splitlines()[0])
    parser.add_argument("--control-plane", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--report", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    serve(options.control_plane, options.report)


if __name__ == "__main__":
    main()
