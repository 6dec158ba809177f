"""The operator's settings on one machine."""

from importlib.metadata import version

from specserve_operator.core.config import OperatorConfig


def local_config() -> OperatorConfig:
    """Images are names only: pods run in the environment that the control plane runs in."""
    release = version("specserve")
    return OperatorConfig(
        default_engine_image=f"specserve-engine:{release}",
        gateway_image=f"specserve-gateway:{release}",
        operator_version=release,
        local=True,
    )
