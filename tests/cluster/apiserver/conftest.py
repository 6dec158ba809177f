"""One cluster, one operator process and one fake kubelet for all tests here; each test has a namespace of its own."""

import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hack.kube.control_plane import ControlPlane
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.site import Site, Tenant

_SHOWN_CHARACTERS = 6000
_SHOWN_TIMES = 12
_SECONDS = pytest.StashKey[list[tuple[str, float]]]()


@pytest.fixture(scope="session")
def site(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The shared control plane with mirror and kubelet. Its operator runs only if a test asks for `operator`."""
    with Site(control_plane, tmp_path_factory.mktemp("site")) as opened:
        yield opened


@pytest.fixture
def operator(site: Site) -> OperatorProcess:
    """The shared operator, which watches the whole cluster; it runs when the test begins."""
    if not site.operator.is_running:
        site.operator.start()
    return site.operator


@pytest.fixture
def no_operator(site: Site) -> None:
    """The shared operator does not run, so that a test can run others."""
    if site.operator.is_running:
        site.operator.stop()


@pytest.fixture
def tenant(site: Site, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    """A new namespace, named after the test. Its services are deleted when the test ends."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    opened = site.new_namespace(f"{words[:50].strip('-')}-{uuid4().hex[:6]}")
    yield opened
    site.api.delete("namespaces", None, opened.namespace)


@pytest.fixture
def record_seconds(request: pytest.FixtureRequest) -> Callable[[float], None]:
    """Notes how long something took, for the summary at the end. No test fails for it."""
    return lambda seconds: request.config.stash[_SECONDS].append((request.node.name, seconds))


def pytest_configure(config: pytest.Config) -> None:
    measured: list[tuple[str, float]] = []
    config.stash[_SECONDS] = measured


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = sorted(config.stash[_SECONDS], key=lambda entry: -entry[1])
    if measured:
        terminalreporter.section("measured, longest first")
        for name, seconds in measured[:_SHOWN_TIMES]:
            terminalreporter.write_line(f"{seconds:7.2f} s  {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the end of the operator's log with a test that failed."""
    report = yield
    if report.failed:
        logs = [_log_of(value) for value in getattr(item, "funcargs", {}).values()]
        for log in {log for log in logs if log is not None}:
            text = log.read_text(errors="replace") if log.exists() else ""
            report.sections.append((f"operator log {log}", text[-_SHOWN_CHARACTERS:]))
    return report


def _log_of(value: object) -> Path | None:
    if isinstance(value, OperatorProcess):
        return value.log_file
    site = value.site if isinstance(value, Tenant) else value
    return site.operator.log_file if isinstance(site, Site) else None
