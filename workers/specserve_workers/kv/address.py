"""Addresses in the form that gRPC wants."""

import ipaddress


def grpc_target(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    try:
        is_ipv6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_ipv6 = False
    return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
