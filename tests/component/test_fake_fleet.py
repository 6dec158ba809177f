"""Hundreds of control ports in one process, each a pod of its own to those who ask."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from specserve_operator.identity.names import PodId
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.runtime.control_channels import ControlChannels, PodUnreachableError
from specserve_operator.runtime.wire import pod_stats
from specserve_protos.v1alpha1 import control_pb2 as pb
from tests.fakes.clock import FakeClock
from tests.fakes.engine import ROOT
from tests.fakes.engine.fleet import Fleet, FleetError, certified, make_pods, write_pods
from tests.fakes.engine.fleet_pod import FleetMember, FleetPod
from tests.fakes.waiting import wait_until
from tests.unit.identity.builders import certified_files, make_authority

COUNT = 300
AT_ONCE = 64
SECONDS = 10.0
_numbers = itertools.count()


def first_address() -> str:
    """The first of a thousand addresses that no other test has: a port may be taken for some time after its server."""
    return f"127.{200 + next(_numbers) % 50}.{os.getpid() % 63 * 4}.1"


async def test_every_endpoint_of_a_fleet_is_its_own_pod() -> None:
    pods = make_pods(COUNT, first_address=first_address())
    async with Fleet() as fleet:
        await fleet.set_pods(pods)
        channels = ControlChannels()
        try:
            calls = asyncio.Semaphore(AT_ONCE)

            async def ask(pod: FleetPod) -> pb.GetStatsResponse:
                async with calls:  # as the operator's collector does
                    return await channels.get_stats(pod.ip, timeout_seconds=SECONDS)

            answers = await asyncio.gather(*(ask(pod) for pod in pods))
            request = pb.SetSpeculationRequest(
                generation=7,
                settings=pb.SpeculationSettings(policy=pb.LENGTH_POLICY_OFF, cap=pb.BATCH_CAP_NONE, max_tokens=4),
            )
            await channels.set_speculation(pods[5].ip, request, timeout_seconds=SECONDS)
            changed = await channels.get_stats(pods[5].ip, timeout_seconds=SECONDS)
            other = await channels.get_stats(pods[6].ip, timeout_seconds=SECONDS)
        finally:
            await channels.close()
        assert [(answer.pod_name, answer.pod_uid) for answer in answers] == [(pod.name, pod.uid) for pod in pods]
        assert (changed.speculation.generation, other.speculation.generation) == (7, 0)
        assert changed.speculation.in_force.policy == pb.LENGTH_POLICY_OFF
        assert [fleet.members[pod.ip].asked for pod in pods[4:8]] == [1, 2, 2, 1]


async def test_pods_come_go_and_change_while_others_go_on() -> None:
    first, second, third = make_pods(3, first_address=first_address(), requests_per_second=0.0)
    channels = ControlChannels()
    async with Fleet() as fleet:
        await fleet.set_pods([first, second])
        kept = fleet.members[first.ip]
        await channels.get_stats(first.ip, timeout_seconds=SECONDS)
        await fleet.set_pods([replace(first, behaviour={"stats_error": "INTERNAL"}), third])
        with pytest.raises(PodUnreachableError, match="INTERNAL"):
            await channels.get_stats(first.ip, timeout_seconds=SECONDS)
        with pytest.raises(PodUnreachableError):
            await channels.get_stats(second.ip, timeout_seconds=1)
        assert (await channels.get_stats(third.ip, timeout_seconds=SECONDS)).pod_name == third.name
        assert fleet.members[first.ip] is kept
        await fleet.set_pods([replace(first, uid="another"), third])
        answer = await channels.get_stats(first.ip, timeout_seconds=SECONDS)
        assert (answer.pod_uid, answer.requests.started) == ("another", 0)
        with pytest.raises(FleetError, match="several pods have the same address"):
            await fleet.set_pods([third, third])
        with pytest.raises(FleetError, match="pod fleet-1: nonsense: no field"):
            await fleet.set_pods([replace(second, behaviour={"nonsense": 1})])
    await channels.close()


async def test_pods_of_a_fleet_have_certificates_of_their_own(tmp_path: Path) -> None:
    authority = make_authority()
    first, second = make_pods(2, first_address=first_address())
    for pod in (first, second):
        certified_files(tmp_path / pod.uid, PodId("llm", "coder", "decode", pod.uid), authority)
    operator = OperatorTls(lambda: authority, hosts=("operator",), now=lambda: datetime.now(UTC))
    channels, strangers = ControlChannels(operator), ControlChannels()
    async with Fleet(tls=certified(tmp_path)) as fleet:
        await fleet.set_pods([first, second])
        answer = await channels.get_stats(first.ip, timeout_seconds=SECONDS, certified_uid=first.uid)
        assert answer.pod_uid == first.uid
        with pytest.raises(PodUnreachableError):
            await channels.get_stats(second.ip, timeout_seconds=2, certified_uid=first.uid)
        with pytest.raises(PodUnreachableError):
            await strangers.get_stats(first.ip, timeout_seconds=2)
    await channels.close()
    await strangers.close()


def decode_pod(**fields: object) -> FleetPod:
    return replace(make_pods(1)[0], **fields)


def reckoned(member: FleetMember) -> pb.GetStatsResponse:
    """What the pod would say now."""

    async def ask() -> pb.GetStatsResponse:
        return await member.GetStats(pb.GetStatsRequest(), None)

    return asyncio.run(ask())


def test_statistics_of_a_fleet_pod_follow_its_load_and_its_behaviour() -> None:
    clock = FakeClock()
    behaviour = {"acceptance_ratio": 0.5, "time_per_output_token_ms": 20.0, "time_to_first_token_ms": 100.0}
    pod = decode_pod(requests_per_second=2.0, prompt_tokens=300, output_tokens=50, behaviour=behaviour)
    member = FleetMember(pod, clock=clock.time)
    assert reckoned(member).requests.started == 0
    clock.advance(30)
    early = pod_stats(reckoned(member))
    assert (early.requests.succeeded, early.requests.prompt_tokens, early.requests.output_tokens) == (60, 18_000, 3000)
    assert sum(early.requests.time_to_first_token.counts) == 60
    assert early.requests.time_to_first_token.sum_ms == pytest.approx(60 * 100, rel=0.05)
    policies = dict(early.speculation.by_policy)
    assert policies["DSDE"].accepted_tokens / policies["DSDE"].drafted_tokens == pytest.approx(0.5, abs=0.01)
    assert early.kv_transfer.loaded_tokens == 18_000
    clock.advance(0.4)
    assert pod_stats(reckoned(member)).requests.succeeded == 60
    clock.advance(0.1)
    assert pod_stats(reckoned(member)).requests.succeeded == 61


def test_prefill_pods_of_a_fleet_serve_caches_and_no_speculation() -> None:
    clock = FakeClock()
    member = FleetMember(decode_pod(pool="prefill", requests_per_second=1.0), clock=clock.time)
    clock.advance(10)
    stats = reckoned(member)
    assert (stats.pool, stats.kv_transfer.served_transfers, stats.kv_transfer.remote_prefills) == ("prefill", 10, 0)
    assert (stats.speculation.started_max_tokens, list(stats.speculation.by_policy)) == (0, [])


@contextmanager
def running_fleet(file: Path) -> Iterator[Path]:
    """The command, and the file that takes what it prints."""
    output = file.with_suffix(".log")
    with output.open("w") as log:
        command = [sys.executable, "-m", "tests.fakes.engine.fleet", "--pods", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        yield output
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_the_command_follows_its_file(tmp_path: Path) -> None:
    file, pods = tmp_path / "pods.json", make_pods(5, first_address=first_address())
    write_pods(file, pods)

    async def names() -> list[str]:
        channels = ControlChannels()
        try:
            return [(await channels.get_stats(pod.ip, timeout_seconds=SECONDS)).pod_name for pod in pods[2:]]
        finally:
            await channels.close()

    with running_fleet(file) as output:
        wait_until(lambda: output.read_text() == "5 pods\n", timeout_seconds=30)
        write_pods(file, pods[2:])
        wait_until(lambda: output.read_text() == "5 pods\n3 pods\n")
        file.write_text("[{}]")
        wait_until(lambda: "not in force: " in output.read_text())
        assert asyncio.run(names()) == [pod.name for pod in pods[2:]]
