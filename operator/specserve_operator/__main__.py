"""`python -m specserve_operator`: the operator in a cluster. Flags only; the work is in `app`."""

import asyncio
import logging
import os
import sys
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated

import typer

from specserve_operator import app as process
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.core.config import OperatorConfig
from specserve_operator.identity.authority import AuthorityPolicy, PolicyError
from specserve_operator.issuing import IssuingOptions
from specserve_operator.logs import LogFormat, configure_logs

_EXIT_FAILURE = 1


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def main(
    *,
    default_engine_image: Annotated[str, typer.Option(help="Image of engines whose service names none.")],
    gateway_image: Annotated[str, typer.Option(help="Image of gateways.")],
    watch_namespace: Annotated[list[str] | None, typer.Option(help="Watch only this one; repeatable.")] = None,
    health_port: Annotated[int, typer.Option(help="/healthz and /readyz.")] = 8080,
    metrics_port: Annotated[int, typer.Option(help="/metrics, for Prometheus.")] = 9090,
    identity_port: Annotated[int, typer.Option(help="gRPC: certificates for pods.")] = 9443,
    identity_secret: Annotated[str, typer.Option(help="Secret in our namespace that keeps the CA.")] = "",
    identity_service: Annotated[str, typer.Option(help="DNS name under which pods reach us.")] = "",
    certificate_lifetime_seconds: Annotated[int, typer.Option(min=1, help="Of pods' certificates.")] = 86400,
    network_policies: Annotated[bool, typer.Option(help="Make NetworkPolicies for every service.")] = True,
    leader_election: Annotated[bool, typer.Option(help="Wait for a Lease before working.")] = False,
    leader_election_lease: Annotated[str, typer.Option(help="Name of the Lease.")] = "specserve-operator",
    log_format: Annotated[LogFormat, typer.Option(help="Form of the log.")] = LogFormat.JSON,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged.")] = LogLevel.INFO,
) -> None:
    """Run the specserve operator: in a pod with its ServiceAccount, elsewhere with a kubeconfig."""
    configure_logs(log_format, log_level.upper())
    namespace = os.environ.get("POD_NAMESPACE", "default")
    issuing = None
    if identity_secret and identity_service:
        issuing = IssuingOptions(
            secret=identity_secret,
            namespace=namespace,
            host=identity_service,
            port=identity_port,
            policy=_policy(certificate_lifetime_seconds),
        )
    config = OperatorConfig(
        default_engine_image=default_engine_image,
        gateway_image=gateway_image,
        operator_version=version("specserve"),
        network_policies=network_policies,
        operator_namespace=namespace,
        identity_server=issuing.server if issuing else None,
    )
    options = process.Options(
        config=config,
        namespaces=tuple(watch_namespace or ()),
        pod_name=os.environ.get("POD_NAME", "specserve-operator"),
        pod_namespace=namespace,
        health_port=health_port,
        metrics_port=metrics_port,
        leader_election_lease=leader_election_lease if leader_election else None,
        issuing=issuing,
    )
    try:
        asyncio.run(process.run(options))
    except (ClusterError, OSError) as error:
        logging.getLogger(__name__).error("%s", error)
        sys.exit(_EXIT_FAILURE)


def _policy(certificate_lifetime_seconds: int) -> AuthorityPolicy:
    try:
        return AuthorityPolicy(certificate_lifetime=timedelta(seconds=certificate_lifetime_seconds))
    except (PolicyError, OverflowError) as error:
        raise typer.BadParameter(str(error), param_hint="--certificate-lifetime-seconds") from error


if __name__ == "__main__":
    # Plain tracebacks: boxes and colours are for terminals, and this goes into a log.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()
