"""A real cluster with the chart installed: three nodes, one for each pool, each with GPUs of its own.

With KUBECONFIG set, that cluster is used as it is: its nodes must have the labels and taints of `site.py`, and it must
be able to pull the images of the chart's values (SPECSERVE_TEST_VALUES names a values file).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.kube.cluster import Cluster
from hack.kube.images import build_image, save_image
from hack.kube.product_images import build_product_images
from tests.fakes.engine.image import IMAGE as FAKE_IMAGE
from tests.fakes.engine.image import lay_out
from tests.kube.site import GPU_TAINT_KEY, NODE_POOL_LABEL, POOLS, RELEASE, ROOT, SYSTEM_NAMESPACE, Site

GPUS_PER_NODE = 4
_IMAGE_FOLDER = "images"


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster | None]:
    """The cluster made here, with all images loaded; None where KUBECONFIG names another one."""
    if os.environ.get("KUBECONFIG"):
        yield None
        return
    folder = tmp_path_factory.mktemp(_IMAGE_FOLDER)
    subprocess.run([sys.executable, "-m", "hack.kube", "setup"], cwd=ROOT, check=True)
    build_product_images(folder)
    lay_out(folder / "fake")
    build_image(folder / "fake" / "Dockerfile", folder / "fake", tag=FAKE_IMAGE)
    save_image(FAKE_IMAGE, folder / "fake.tar")
    cluster = Cluster()
    try:
        cluster.up(nodes=len(POOLS))
        for node, pool in zip(cluster.nodes(), POOLS, strict=True):
            cluster.kubectl("label", "node", node.name, f"{NODE_POOL_LABEL}={pool}", "--overwrite")
            cluster.kubectl("taint", "node", node.name, f"{GPU_TAINT_KEY}=present:NoSchedule", "--overwrite")
            cluster.set_gpus(node.name, GPUS_PER_NODE)
        cluster.load_image(*sorted(folder.glob("*.tar")))
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def site(rig: Cluster | None) -> Iterator[Site]:
    """The cluster with the chart installed."""
    site = Site(rig.kubeconfig if rig is not None else Path(os.environ["KUBECONFIG"]))
    values = Path(os.environ.get("SPECSERVE_TEST_VALUES", str(Path(__file__).parent / "values.yaml")))
    site.helm(
        *("upgrade", "--install", RELEASE, str(ROOT / "charts" / "specserve")),
        *("--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--values", str(values), "--wait", "--timeout=180s"),
    )
    yield site
    site.helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--wait")
