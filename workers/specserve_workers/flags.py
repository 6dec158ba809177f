"""Command line of the serving entry points. What is fixed for the life of a pod is a flag (docs/contracts.md)."""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from specserve_workers.control.resolver import PeerAddressError, parse_peer_address
from specserve_workers.frontend.middleware import Pool
from specserve_workers.vllm.launch import OWNED_FLAGS

RUNTIME_STATE: Final = Path("/etc/specserve/runtime/state.json")
IDENTITY_TOKEN: Final = Path("/var/run/secrets/specserve/token")
TRUST_BUNDLE: Final = Path("/etc/specserve/trust/ca.pem")
IDENTITY_DIRECTORY: Final = Path("/var/run/specserve/identity")

# Flags of the engine that the operator decides, so that probes, peers and the KV cache's content stay what it says.
OWNED_ENGINE_FLAGS: Final = frozenset(OWNED_FLAGS) | {
    "--allow-credentials",
    "--api-key",
    "--api-server-count",
    "-asc",
    "--config",
    "-dp",
    "--enable-request-id-headers",
    "--enable-ssl-refresh",
    "--grpc",
    "--grpc-port",
    "--headless",
    "--host",
    "--kv-transfer-config",
    "--middleware",
    "--model",
    "--no-enable-ssl-refresh",
    "--port",
    "--revision",
    "--root-path",
    "--scheduler-cls",
    "--served-model-name",
    "--shutdown-timeout",
    "--uds",
    "--worker-extension-cls",
}
# Every flag that begins so, those of a later engine included.
OWNED_FLAG_FAMILIES: Final = ("--data-parallel-", "--spec-", "--ssl-")

# `--flag value`, `--flag=value`, `--flag.key value` for one key of a JSON value, `--flag+ value` to add to a list.
_FLAG_NAME: Final = re.compile(r"-[^=.+]*")


class FlagError(ValueError):
    """A flag that cannot be used. The message starts with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFlags:
    method: str
    model: str
    model_revision: str | None
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFlags:
    port: int
    lease_seconds: float
    connect_timeout_ms: int
    stall_timeout_ms: int
    on_failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityFlags:
    """Where a pod gets its certificate, and where it puts it. `https_port`: of a prefill pod, for decode pods."""

    server: str
    token: Path
    trust_bundle: Path
    directory: Path
    https_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFlags:
    """Everything a serving pod is started with. Without `identity` it speaks plaintext."""

    pool: Pool
    model: str
    model_revision: str | None
    served_model_name: str
    service: str
    revision: str
    target_revision: str
    host: str
    http_port: int
    control_port: int
    kv: KvFlags
    identity: IdentityFlags | None
    runtime_state: Path
    draft: DraftFlags | None
    prefill_peers: str | None
    drain_timeout_seconds: float
    pod_name: str
    pod_uid: str
    pod_namespace: str
    engine_args: tuple[str, ...]

    @property
    def has_kv_transfer(self) -> bool:
        """Prefill pods give KV away; decode pods load it where they have peers."""
        return self.pool is Pool.PREFILL or self.prefill_peers is not None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def parse_flags(pool: Pool, argv: Sequence[str], *, environ: Mapping[str, str] = os.environ) -> ServingFlags:
    """Reads a pod's command line; everything after `--` goes to the engine.

    Raises:
        FlagError: a flag is missing, unknown, out of its range, or owned by the operator and given to the engine.
    """
    own, engine_args = _split(argv)
    values = _parser(pool).parse_args(own)
    refuse_owned_flags(engine_args)
    decode = pool is Pool.DECODE
    if decode and values.prefill_peers:
        try:
            parse_peer_address(values.prefill_peers)
        except PeerAddressError as error:
            raise FlagError(f"--prefill-peers: {error}") from error
    return ServingFlags(
        pool=pool,
        model=values.model,
        model_revision=values.model_revision or None,
        served_model_name=values.served_model_name,
        service=values.service,
        revision=values.revision,
        target_revision=values.target_revision,
        host=values.host,
        http_port=values.http_port,
        control_port=values.control_port,
        kv=KvFlags(
            port=values.kv_port,
            lease_seconds=values.kv_lease_seconds,
            connect_timeout_ms=values.kv_connect_timeout_ms,
            stall_timeout_ms=values.kv_stall_timeout_ms,
            on_failure=values.kv_on_failure,
        ),
        identity=_identity(values, environ),
        runtime_state=values.runtime_state,
        draft=_draft(values) if decode else None,
        prefill_peers=(values.prefill_peers or None) if decode else None,
        drain_timeout_seconds=values.drain_timeout_seconds,
        pod_name=environ.get("POD_NAME", ""),
        pod_uid=environ.get("POD_UID", ""),
        pod_namespace=environ.get("POD_NAMESPACE", ""),
        engine_args=tuple(engine_args),
    )


def refuse_owned_flags(engine_args: Iterable[str]) -> None:
    """Raises FlagError naming the first engine flag that the operator owns, in any spelling the engine takes."""
    for arg in engine_args:
        match = _FLAG_NAME.match(arg)
        if match is None or arg == "-":
            continue
        name = match[0].replace("_", "-")
        owned = _owned_flag(name)
        if owned == name:
            raise FlagError(f"{name}: set by the operator, not to be given among the engine's arguments")
        if owned is not None:
            raise FlagError(f"{name}: can be read as {owned}, which is set by the operator")


def _owned_flag(name: str) -> str | None:
    """The owned flag that the engine reads `name` as, or may read it as.

    The engine completes abbreviations. Which of them are unambiguous changes with its version, so none is allowed; no
    flag of its own is the beginning of an owned one. A value may also be glued to a flag of one dash.
    """
    if name in OWNED_ENGINE_FLAGS:
        return name
    for owned in (*sorted(OWNED_ENGINE_FLAGS), *OWNED_FLAG_FAMILIES):
        is_open = owned in OWNED_FLAG_FAMILIES or not owned.startswith("--")
        if owned.startswith(name) or (is_open and name.startswith(owned)):
            return owned
    return None


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    args = list(argv)
    if "--" not in args:
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _identity(values: argparse.Namespace, environ: Mapping[str, str]) -> IdentityFlags | None:
    if not values.identity_server:
        return None
    for name in ("POD_NAMESPACE", "POD_UID"):
        if not environ.get(name):
            raise FlagError(f"--identity-server: needs {name} in the environment")
    return IdentityFlags(
        server=values.identity_server,
        token=values.identity_token,
        trust_bundle=values.trust_bundle,
        directory=values.identity_directory,
        https_port=getattr(values, "https_port", 0),
    )


def _draft(values: argparse.Namespace) -> DraftFlags | None:
    if values.draft_method is None:
        for name in ("draft_model", "draft_model_revision"):
            if getattr(values, name):
                raise FlagError(f"--{name.replace('_', '-')}: without --draft-method")
        return None
    if not values.draft_model:
        raise FlagError("--draft-model: required with --draft-method")
    return DraftFlags(
        method=values.draft_method,
        model=values.draft_model,
        model_revision=values.draft_model_revision or None,
        max_tokens=values.max_draft_tokens,
    )


def _parser(pool: Pool) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"specserve_workers.{pool}", allow_abbrev=False, usage="%(prog)s FLAGS [-- ENGINE ARGS]")
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_ID")
    add("--model-revision", metavar="COMMIT")
    add("--served-model-name", required=True, metavar="NAME")
    add("--service", required=True, metavar="NAME")
    add("--revision", required=True, metavar="HASH")
    add("--target-revision", required=True, metavar="HASH")
    add("--host", required=True, metavar="IP", help="address to listen on, the pod's own")
    add("--http-port", type=_port, default=8000)
    add("--control-port", type=_port, default=9000)
    add("--kv-port", type=_port, default=9100, help="port of rank 0; rank r listens on this plus r")
    add("--runtime-state", type=Path, default=RUNTIME_STATE, metavar="FILE")
    add("--kv-lease-seconds", type=_positive(float), default=30.0)
    add("--kv-connect-timeout-ms", type=_positive(int), default=500)
    add("--kv-stall-timeout-ms", type=_positive(int), default=5000)
    add("--kv-on-failure", choices=("Recompute", "Fail"), default="Recompute")
    add("--drain-timeout-seconds", type=_seconds, default=120.0, help="0: what runs is cut at once")
    add("--identity-server", type=_address, metavar="HOST:PORT", help="certificates; absent: plaintext")
    add("--identity-token", type=Path, default=IDENTITY_TOKEN, metavar="FILE")
    add("--trust-bundle", type=Path, default=TRUST_BUNDLE, metavar="FILE")
    add("--identity-directory", type=Path, default=IDENTITY_DIRECTORY, metavar="DIR", help="in memory")
    if pool is Pool.PREFILL:
        add("--https-port", type=_port, default=8443, help="for decode pods; with --identity-server")
    if pool is Pool.DECODE:
        add("--draft-method", choices=("DraftModel",))
        add("--draft-model", metavar="PATH_OR_ID")
        add("--draft-model-revision", metavar="COMMIT")
        add("--max-draft-tokens", type=_draft_tokens, default=8)
        add("--prefill-peers", metavar="HOST:PORT", help="absent: prompts are prefilled here")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1-65535)")
    return int(text)


def _address(text: str) -> str:
    try:
        parse_peer_address(text)
    except PeerAddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _draft_tokens(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 1-64")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _positive(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]  # argparse takes any callable
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < 1e7:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return value

    return convert
