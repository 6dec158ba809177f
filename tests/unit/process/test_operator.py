"""The parts of the process together, against a small API server: standing by, and following what there is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specserve_operator.app import Operator, reconcile_alone
from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.discovery import InstalledCrds, Offer
from specserve_operator.cluster.kube.kinds import OPTIONAL, POD_MONITOR, SERVICE
from specserve_operator.core.config import OperatorConfig
from tests.fakes.clock import FakeClock, settle
from tests.unit.process.builders import STATUS, ApiServer, connected, make_operator, make_options, make_service

POD_MONITORS = "/apis/monitoring.coreos.com/v1/namespaces/llm/podmonitors/coder"
TRUST = "/api/v1/namespaces/llm/configmaps/coder-trust"


@asynccontextmanager
async def working(client: KubeClient, operator: Operator) -> AsyncIterator[None]:
    """The reconciler at work."""
    stop = asyncio.Event()
    running = asyncio.create_task(reconcile_alone(client, operator, make_options(), stop))
    yield
    stop.set()
    await running


async def test_a_standby_is_alive_however_long_it_waits_and_then_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve_operator.cluster.kube.lease.RETRY_SECONDS", 0.01)
    api, clock, stop = ApiServer(), FakeClock(), asyncio.Event()
    api.holder = "another"
    options = make_options(lease="operator")
    async with connected(api) as client:
        operator = await make_operator(client, options, Offer(), clock=clock)
        operator.cluster.observe(SERVICE, make_service())
        standing_by = asyncio.create_task(reconcile_alone(client, operator, options, stop))
        await api.wait(lambda: any("leases" in path for path in api.paths))
        operator.take(Offer(crds=InstalledCrds("other ones")))
        await settle()
        clock.advance(601)

        assert operator.check_queue() is None
        assert len(operator.reconciler.queue) == 0
        assert STATUS not in api.written

        api.holder = ""
        await api.wait(lambda: STATUS in api.written)
        stop.set()
        await standing_by
    assert operator.issuing is not None
    assert api.written[TRUST]["data"] == {"ca.pem": operator.issuing.trust_bundle}


async def test_services_are_looked_at_once_at_the_start_and_whenever_the_settings_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, bool]] = []

    async def reconfigure(config: OperatorConfig) -> None:
        seen.append((config.trust_bundle, config.pod_monitors))

    async def run(stop: asyncio.Event) -> None:
        await settle()
        operator.take(Offer())
        await settle()

    async with connected(ApiServer()) as client:
        operator = await make_operator(client, make_options(), Offer(OPTIONAL))
        monkeypatch.setattr(operator.reconciler, "reconfigure", reconfigure)
        monkeypatch.setattr(operator.reconciler, "run", run)
        await operator.reconcile(asyncio.Event())
    assert operator.issuing is not None
    bundle = operator.issuing.trust_bundle
    assert seen == [(bundle, True), (bundle, False)]


async def test_an_optional_kind_that_is_installed_later_is_used_and_one_that_goes_is_not_missed() -> None:
    api = ApiServer()
    async with connected(api) as client:
        operator = await make_operator(client, make_options(), Offer())
        assert POD_MONITOR not in operator.cluster.kinds
        operator.cluster.observe(SERVICE, make_service())
        async with working(client, operator):
            await api.wait(lambda: STATUS in api.written)
            assert POD_MONITORS not in api.written

            operator.take(Offer(OPTIONAL))
            await api.wait(lambda: POD_MONITORS in api.written)
            assert POD_MONITOR in operator.cluster.kinds
            await api.wait(lambda: len(operator.cluster.cache.refs(POD_MONITOR)) == 1)

            operator.take(Offer())
            assert POD_MONITOR not in operator.cluster.kinds
            assert operator.cluster.cache.refs(POD_MONITOR) == []
    assert api.paths.count(POD_MONITORS) == 2  # looked for, and made


async def test_watches_go_on_from_the_list_at_the_start_and_later_ones_cause_another() -> None:
    api = ApiServer()
    api.is_empty = True
    async with connected(api) as client:
        operator = await make_operator(client, make_options(), Offer())
        await operator.list_everything()
        listed = operator.cluster.listed[SERVICE, None]

        assert listed == 101  # with the authority's Secret
        assert operator.on_watch(SERVICE, None, listed + 7) == listed
        assert not operator.relisted.is_set()
        assert operator.on_watch(SERVICE, None, listed + 9) == listed + 9
        assert operator.relisted.is_set()


async def test_a_kind_that_is_missed_is_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve_operator.app._OFFER_SETTLE_SECONDS", 0.0)
    api = ApiServer()
    api.failing = ("podmonitors",)
    looked = asyncio.Event()

    async def find_offer(client: KubeClient, known: Offer) -> Offer:
        looked.set()
        return Offer()

    monkeypatch.setattr("specserve_operator.app.find_offer", find_offer)
    async with connected(api) as client:
        operator = await make_operator(client, make_options(), Offer(OPTIONAL))
        operator.cluster.observe(SERVICE, make_service())
        following = asyncio.create_task(operator.follow_offer(client))
        async with working(client, operator):
            await api.wait(lambda: api.condition("Ready").get("reason") not in (None, "ApplyFailed"))
        following.cancel()
    assert looked.is_set()
    assert POD_MONITOR not in operator.cluster.kinds


async def test_outdated_crds_are_shown_while_they_are_and_get_no_field_that_they_lack() -> None:
    problem = "the installed CRDs are older than the operator and lack SpeculativeService.status.pools"
    known = {"conditions": {"items": {"x-kubernetes-preserve-unknown-fields": True}}, "observedGeneration": {}}
    outdated = InstalledCrds("old", problem, {SERVICE.name: {"properties": known}})
    api = ApiServer()
    async with connected(api) as client:
        operator = await make_operator(client, make_options(), Offer(crds=outdated))
        operator.cluster.observe(SERVICE, make_service())
        async with working(client, operator):
            await api.wait(lambda: api.condition("UpgradeAvailable").get("reason") == "CRDOutdated")
            assert api.condition("UpgradeAvailable")["message"] == problem
            assert set(api.written[STATUS]["status"]) == {"conditions", "observedGeneration"}

            operator.take(Offer(crds=InstalledCrds("new")))
            await api.wait(lambda: api.condition("UpgradeAvailable").get("reason") == "UpToDate")
            assert "pools" in api.written[STATUS]["status"]
