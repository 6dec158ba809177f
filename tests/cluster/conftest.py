"""An API server for tests that need the real one: RBAC, server-side apply, watches, owner references, tokens."""

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hack.kube.control_plane import ControlPlane

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One control plane for all tests, with controllers and the product's CRDs; each test takes its own `namespace`.

    A test that stops or pauses parts of it takes `own_control_plane`.
    """
    folder = tmp_path_factory.mktemp("control-plane")
    with ControlPlane(folder, controllers=True, manifests=[ROOT / "crds"]) as started:
        yield started


@pytest.fixture
def own_control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane for one test, with the product's CRDs and without controllers (nothing deletes namespaces)."""
    with ControlPlane(tmp_path / "control-plane", manifests=[ROOT / "crds"]) as started:
        yield started


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new namespace, named after the test, in the shared control plane."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    name = f"{words[:50].strip('-')}-{uuid4().hex[:6]}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")
