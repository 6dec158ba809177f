"""What the operator tells of itself: probes for the kubelet, numbers for Prometheus."""

import pytest

from tests.cluster.fake_kubelet import Behaviour, Outcome
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.site import Tenant, service

pytestmark = pytest.mark.cluster


def condition(tenant: Tenant, type_: str, status: str) -> str:
    labels = f'namespace="{tenant.namespace}",service="coder",status="{status}",type="{type_}"'
    return f"specserve_service_condition{{{labels}}}"


def test_running_operator_is_alive_and_ready(operator: OperatorProcess) -> None:
    assert operator.probe("/healthz") == (200, "ok\n")
    assert operator.probe("/readyz") == (200, "ok\n")
    assert operator.probe("/elsewhere")[0] == 404


def test_numbers_move_with_the_work(operator: OperatorProcess, tenant: Tenant) -> None:
    before = operator.metrics()
    tenant.apply(service())
    tenant.wait_ready()
    after = operator.metrics()
    for name in (
        'specserve_operator_reconcile_total{result="ok"}',
        "specserve_operator_reconcile_duration_seconds_count",
        'specserve_operator_apply_total{kind="Deployment",result="created"}',
        'specserve_operator_apply_total{kind="ConfigMap",result="created"}',
        "specserve_operator_cached_objects",
    ):
        assert after[name] > before.get(name, 0.0), name
    assert after.get('specserve_operator_reconcile_total{result="error"}', 0.0) == 0
    for name in ("workqueue_depth", "workqueue_oldest_key_age_seconds", "watch_age_seconds"):
        assert 0 <= after[f"specserve_operator_{name}"] < 60, name


def test_conditions_of_a_service_are_shown_while_it_is_there(operator: OperatorProcess, tenant: Tenant) -> None:
    tenant.behave(Behaviour(Outcome.NEVER_READY))
    tenant.apply(service())
    tenant.wait_reason("ModelLoading")
    tenant.wait(
        lambda: operator.metrics().get(condition(tenant, "Ready", "False")) == 1, what="Ready is shown as False"
    )
    tenant.behave(Behaviour())
    tenant.wait_ready()
    tenant.wait(lambda: operator.metrics().get(condition(tenant, "Ready", "True")) == 1, what="Ready is shown as True")
    assert condition(tenant, "Ready", "False") not in operator.metrics()

    tenant.delete()
    tenant.wait(lambda: not any(tenant.namespace in name for name in operator.metrics()), what="nothing is shown of it")


def test_refused_objects_are_counted(operator: OperatorProcess, tenant: Tenant) -> None:
    name = 'specserve_operator_apply_total{kind="Deployment",result="refused"}'
    before = operator.metrics().get(name, 0.0)
    container = {"name": "engine", "resources": {"limits": {"cpu": "-1"}}}
    tenant.apply(service(decode={"replicas": 1, "template": {"spec": {"containers": [container]}}}))
    tenant.wait_reason("ApplyFailed")
    assert operator.metrics()[name] > before
    failed = 'specserve_operator_reconcile_total{result="failed"}'
    tenant.wait(lambda: operator.metrics().get(failed, 0) > 0, what="a reconcile is counted as failed")
