"""The certificate service of the operator: authority, server and the operator's own certificate, wired together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from specserve_operator.cluster.kube.cache import ObjectCache
from specserve_operator.cluster.kube.client import KubeClient
from specserve_operator.cluster.kube.kinds import DEPLOYMENT, POD, SERVICE, Kind
from specserve_operator.cluster.kube.secret import SecretStore
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.core.objects import Manifest, ObjectRef
from specserve_operator.identity.authority import AuthorityPolicy, AuthorityStateError
from specserve_operator.identity.issuer_keys import IssuerKeys, KeysUnavailableError
from specserve_operator.identity.keeper import AuthorityKeeper, CaStoreError
from specserve_operator.identity.names import TOKEN_AUDIENCE, PodId
from specserve_operator.identity.operator_tls import OperatorTls
from specserve_operator.identity.pods import certified_pod_id
from specserve_operator.identity.service import IdentityServer, IdentityServicer
from specserve_operator.identity.tokens import PodClaims, TokenVerifier

_STOP_SECONDS = 2.0
# The API server gives its keys under the first of these only.
_KEY_FORMATS = "application/jwk-set+json, application/json"


@dataclass(frozen=True, slots=True)
class IssuingOptions:
    """`secret`: name of the Secret in `namespace` that keeps the authority. `host`: DNS name of our Service.

    `listen_host`: the address to listen on; None for all of them.
    """

    secret: str
    namespace: str
    host: str
    port: int
    policy: AuthorityPolicy
    listen_host: str | None = None

    @property
    def server(self) -> str:
        """Where pods get their certificates."""
        return f"{self.host}:{self.port}"


class Issuing:
    """Everything that has to do with certificates.

    `on_change` is called whenever other authorities are trusted, `on_call` with the outcome of each pod's call.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        options: IssuingOptions,
        *,
        now: Callable[[], datetime],
        time: Callable[[], float],
        on_change: Callable[[], None],
        on_call: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._cache = cache
        self._options = options
        store = SecretStore(client, namespace=options.namespace, name=options.secret)
        self._keeper = AuthorityKeeper(store, options.policy, now=now, on_change=on_change)
        self.tls = OperatorTls(lambda: self._keeper.authority, hosts=(options.host,), now=now)
        verifier = TokenVerifier(IssuerKeys(_ApiServerKeys(client), time), audience=TOKEN_AUDIENCE)
        self.servicer = IdentityServicer(
            verifier, self.find_pod, authority=lambda: self._keeper.authority, now=now, clock=time, on_call=on_call
        )

    @property
    def trust_bundle(self) -> str:
        """PEM of the authorities to be trusted now."""
        return self._keeper.authority.trust_bundle

    async def load(self) -> None:
        """Reads the authority, or makes it. Raises `ClusterError`."""
        try:
            await self._keeper.start()
        except (CaStoreError, AuthorityStateError) as error:
            raise ClusterError(f"no certificate authority: {error}", retryable=False) from error

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answers pods. Raises `IdentityPortError`."""
        server = IdentityServer(self.servicer, self.tls)
        await server.start(self._options.listen_host, self._options.port)
        try:
            yield
        finally:
            await server.stop(_STOP_SECONDS)

    async def run(self, stop: asyncio.Event) -> None:
        """Keeps the authority in step with time until `stop` is set."""
        await self._keeper.run(stop)

    def find_pod(self, claims: PodClaims) -> PodId | None:
        """Who the pod of a token is; None while it is not known. Raises `PodRefusedError`."""

        def find(kind: Kind, name: str) -> Manifest | None:
            return self._cache.get(ObjectRef(kind.api_version, kind.name, claims.namespace, name))

        pod = find(POD, claims.pod_name)
        if pod is None:
            return None
        return certified_pod_id(
            claims, pod, find_service=partial(find, SERVICE), find_deployment=partial(find, DEPLOYMENT)
        )


class _ApiServerKeys:
    """The documents with which an API server publishes its keys."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def get(self, path: str) -> Any:
        try:
            _, document = await self._client.request("GET", path, headers={"Accept": _KEY_FORMATS})
        except ClusterError as error:
            raise KeysUnavailableError(f"{path}: {error}") from error
        return document
