"""What a pod's call for a certificate costs, and that it is counted."""

from typing import Any, NoReturn

import grpc
import pytest

from specserve_operator.cluster.kube.cache import ObjectCache
from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.discovery import Offer
from specserve_operator.cluster.kube.kinds import DEPLOYMENT, POD, SERVICE
from specserve_operator.core.objects import Manifest, ObjectRef
from specserve_operator.identity.names import PodId
from specserve_operator.identity.pods import PodRefusedError
from specserve_operator.issuing import Issuing
from specserve_protos.v1alpha1 import identity_pb2 as pb
from tests.unit.identity.builders import DECODE, Clock
from tests.unit.identity.test_pods import CLAIMS, make_deployment, make_pod
from tests.unit.process.builders import ApiServer, connected, make_operator, make_options


class CountingCache(ObjectCache):
    """Counts the objects that are read, each of which is parsed."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def get(self, ref: ObjectRef) -> Manifest | None:
        self.reads.append(ref.kind)
        return super().get(ref)

    def owned(self, key: Any) -> NoReturn:
        pytest.fail("every object of the service is read")


def make_issuing(client: KubeClient, cache: ObjectCache) -> Issuing:
    options, clock = make_options().issuing, Clock()
    assert options is not None
    return Issuing(client, cache, options, now=clock.now, time=clock.seconds, on_change=lambda: None)


async def test_a_call_reads_three_objects_however_many_there_are() -> None:
    cache = CountingCache()
    deployment = make_deployment()
    deployment["metadata"] = deployment["metadata"] | {"namespace": "llm"}
    cache.put(SERVICE, {"metadata": {"name": "coder", "namespace": "llm", "uid": "service-uid"}})
    cache.put(DEPLOYMENT, deployment)
    for number in range(50):
        cache.put(POD, make_pod(name=f"another-{number}"))
    cache.put(POD, make_pod())
    async with connected(ApiServer()) as client:
        issuing = make_issuing(client, cache)

    assert issuing.find_pod(CLAIMS) == PodId("llm", "coder", "decode", DECODE.uid)
    assert cache.reads == ["Pod", "SpeculativeService", "Deployment"]

    cache.reads.clear()
    cache.put(POD, make_pod(labels={}))
    with pytest.raises(PodRefusedError):
        issuing.find_pod(CLAIMS)
    assert cache.reads == ["Pod"]


class Context:
    """A call whose end is an exception, as in gRPC."""

    def peer(self) -> str:
        return "ipv4:10.0.0.1:5000"

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise ConnectionAbortedError(code.name)


async def test_calls_are_counted_by_their_outcome() -> None:
    name = 'specserve_operator_certificates_total{outcome="UNAUTHENTICATED"}'
    async with connected(ApiServer()) as client:
        operator = await make_operator(client, make_options(), Offer())
        assert operator.issuing is not None
        for _ in range(2):
            with pytest.raises(ConnectionAbortedError, match="UNAUTHENTICATED"):
                await operator.issuing.servicer.Certify(pb.CertifyRequest(token="none"), Context())  # type: ignore[arg-type]
    assert f"{name} 2.0\n" in (await operator.metrics.render()).decode()
