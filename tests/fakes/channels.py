"""Control channels to pods that are only answers."""

import asyncio
from collections.abc import Collection, Iterable

from specserve_operator.runtime.clock import Clock, sleep
from specserve_operator.runtime.control_channels import PodUnreachableError
from specserve_protos.v1alpha1 import control_pb2 as pb


class FakeChannels:
    """Pods by address: what they answer, or that they do not."""

    def __init__(self) -> None:
        self.answers: dict[str, pb.GetStatsResponse | None] = {}
        self.pushed: list[tuple[str, pb.SetSpeculationRequest]] = []
        self.kept: set[str] = set()
        self.dropped: list[str] = []
        self.hung: dict[str, Clock] = {}  # those that say nothing before the time-out
        self.asked: list[str] = []
        self.certified: dict[str, str | None] = {}
        self.is_closed = False
        self.running = self.most_running = 0

    async def get_stats(
        self, pod_ip: str, *, timeout_seconds: float, certified_uid: str | None = None
    ) -> pb.GetStatsResponse:
        self.asked.append(pod_ip)
        self.certified[pod_ip] = certified_uid
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await (sleep(self.hung[pod_ip], timeout_seconds) if pod_ip in self.hung else asyncio.sleep(0))
        self.running -= 1
        answer = self.answers.get(pod_ip)
        if answer is None:
            raise PodUnreachableError("UNAVAILABLE")
        return answer

    async def set_speculation(
        self,
        pod_ip: str,
        request: pb.SetSpeculationRequest,
        *,
        timeout_seconds: float,
        certified_uid: str | None = None,
    ) -> pb.SetSpeculationResponse:
        self.pushed.append((pod_ip, request))
        return pb.SetSpeculationResponse(applied=True)

    async def keep_only(self, pod_ips: Collection[str]) -> None:
        self.kept = set(pod_ips)

    async def drop(self, pod_ips: Iterable[str]) -> None:
        self.dropped += pod_ips

    async def close(self) -> None:
        self.is_closed = True
