"""An API server in a few lines, for tests of the parts of the operator's process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from aiohttp import web
from kubernetes.aio.client import Configuration

from specserve_operator.app import Operator, Options
from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.discovery import Offer
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import Manifest
from specserve_operator.identity.authority import AuthorityPolicy
from specserve_operator.issuing import IssuingOptions
from specserve_operator.probes import serving
from specserve_operator.runtime.clock import Clock

LEASES = "/apis/coordination.k8s.io/v1/namespaces/home/leases"
SECRET = "/api/v1/namespaces/home/secrets/ca"
STATUS = "/apis/specserve.dev/v1alpha1/namespaces/llm/speculativeservices/coder/status"


def make_service() -> Manifest:
    """As a list shows it."""
    return {
        "metadata": {"name": "coder", "namespace": "llm", "uid": "u-1", "generation": 1, "resourceVersion": "1"},
        "spec": {"model": {"uri": "file:///models/target"}, "prefill": {"replicas": 1}, "decode": {"replicas": 1}},
    }


class ApiServer:
    """Remembers what is written, and gives it back with another version. `holder`: who has the Lease; empty: nobody.

    `failing`: words in the paths of writes that it refuses. `is_empty`: its lists have nothing in them; else there are
    none.
    """

    def __init__(self) -> None:
        self.holder = ""
        self.failing: tuple[str, ...] = ()
        self.is_empty = False
        self.written: dict[str, Any] = {}
        self.paths: list[str] = []
        self._version = 100

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.paths.append(request.path)
        if request.method == "GET":
            found = self._get(request.path)
            return web.json_response(found or {"message": "none"}, status=200 if found else 404)
        if any(word in request.path for word in self.failing):
            return web.json_response({"message": "no such kind"}, status=404)
        self._version += 1
        body = json.loads(text)
        self.written[request.path] = body
        if request.path.startswith(LEASES):
            self.holder = body["spec"].get("holderIdentity", "")
        answer = make_service() | body if request.path == STATUS else body
        return web.json_response(answer | {"metadata": answer["metadata"] | {"resourceVersion": str(self._version)}})

    def _get(self, path: str) -> Any:
        if path == SECRET:
            return {"metadata": {"resourceVersion": "1"}}
        if path.startswith(LEASES) and self.holder:
            return {"metadata": {"resourceVersion": "1"}, "spec": {"holderIdentity": self.holder}}
        return {"metadata": {"resourceVersion": str(self._version)}, "items": []} if self.is_empty else None

    async def wait(self, is_so: Callable[[], bool]) -> None:
        """Returns when that is so."""
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110 - it may be anything
                await asyncio.sleep(0.005)

    def condition(self, type_: str) -> dict[str, Any]:
        """A condition of the status that was written last; empty if there is none."""
        conditions = self.written.get(STATUS, {}).get("status", {}).get("conditions") or ()
        return next((dict(c) for c in conditions if c["type"] == type_), {})


@asynccontextmanager
async def connected(api: ApiServer) -> AsyncIterator[KubeClient]:
    """A client of `api`, which is served as long."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with serving(app, "127.0.0.1", 0) as port, KubeClient(Configuration(host=f"http://127.0.0.1:{port}")) as kube:
        yield kube


def make_options(*, lease: str | None = None) -> Options:
    issuing = IssuingOptions(
        secret="ca",
        namespace="home",
        host="operator.home.svc",
        port=9443,
        policy=AuthorityPolicy(certificate_lifetime=timedelta(hours=1)),
    )
    config = OperatorConfig(
        default_engine_image="engine:1", gateway_image="gateway:1", operator_version="1", identity_server=issuing.server
    )
    return Options(config=config, pod_name="us", pod_namespace="home", leader_election_lease=lease, issuing=issuing)


async def make_operator(client: KubeClient, options: Options, offer: Offer, *, clock: Clock | None = None) -> Operator:
    """One that has an authority."""
    operator = Operator(client, options, offer, clock=clock)
    assert operator.issuing is not None
    await operator.issuing.load()
    return operator
