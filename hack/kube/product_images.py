"""The product's images for the cluster, built from the Dockerfiles that are committed."""

from pathlib import Path

from hack.kube.images import ROOT, build_image, debian_image, pip_secrets, save_image

OPERATOR_IMAGE = "localhost/specserve-operator:test"
WORKER_IMAGE = "localhost/specserve-worker:test"
# One base for both, so that a node keeps it once.
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libnuma1")


def build_product_images(folder: Path) -> list[Path]:
    """Builds the operator's and the workers' image; the archives are `folder`/operator.tar and worker.tar.

    The workers' has no engine, which is gigabytes: pods mount a virtual environment's site-packages from the
    machine and name it in PYTHONPATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = debian_image(BASE_PACKAGES)
    archives = []
    images = {
        "operator": (OPERATOR_IMAGE, {"BASE": base}),
        "worker": (WORKER_IMAGE, {"BASE": base, "REQUIREMENTS": "requirements/workers.txt"}),
    }
    for name, (tag, arguments) in images.items():
        with pip_secrets() as secrets:
            build_image(ROOT / "images" / name / "Dockerfile", ROOT, tag=tag, arguments=arguments, secrets=secrets)
        archives.append(folder / f"{name}.tar")
        save_image(tag, archives[-1])
    return archives
