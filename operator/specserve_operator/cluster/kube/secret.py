"""The certificate authority's state in a Secret of the operator's own namespace."""

import base64
import binascii

from specserve_operator.cluster.kube.client import MERGE_PATCH, ApiError, KubeClient
from specserve_operator.cluster.kube.kinds import SECRET
from specserve_operator.cluster.protocol import ClusterError
from specserve_operator.identity.keeper import CaConflictError, CaStoreError, Stored

_KEY = "authority.json"


class SecretStore:
    """One key of a Secret that is there already: the operator may read and change this one, and make none."""

    def __init__(self, client: KubeClient, *, namespace: str, name: str) -> None:
        self._client = client
        self._path = SECRET.path(namespace, name)
        self._label = f"Secret {namespace}/{name}"

    async def load(self) -> Stored:
        """See `CaStore`."""
        try:
            secret = await self._client.get(self._path)
        except ApiError as error:
            if error.status == 404:
                raise CaStoreError(f"{self._label} is missing: the chart makes it, empty; make it again") from error
            raise CaStoreError(f"{self._label}: {error}") from error
        except ClusterError as error:
            raise CaStoreError(f"{self._label}: {error}") from error
        text = (secret.get("data") or {}).get(_KEY, "")
        try:
            data = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise CaStoreError(f"{self._label}: {_KEY} is not base64; remove that key to begin anew") from error
        return Stored(data or None, secret["metadata"]["resourceVersion"])

    async def save(self, data: bytes, *, version: str) -> str:
        """See `CaStore`."""
        # The version in the body makes the API server refuse what was decided on an older state.
        body = {"metadata": {"resourceVersion": version}, "data": {_KEY: base64.b64encode(data).decode()}}
        try:
            _, secret = await self._client.request(
                "PATCH", self._path, body=body, headers={"Content-Type": MERGE_PATCH}
            )
        except ApiError as error:
            if error.status == 409:
                raise CaConflictError(f"{self._label} was changed meanwhile") from error
            raise CaStoreError(f"{self._label}: {error}") from error
        except ClusterError as error:
            raise CaStoreError(f"{self._label}: {error}") from error
        return str(secret["metadata"]["resourceVersion"])
