"""Who may read pods: tokens of ServiceAccounts, and the Roles bound to them."""

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specserve_operator.cluster.local.store import ObjectKey, ObjectStore


@dataclass(frozen=True, slots=True, order=True)
class ServiceAccount:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"


class PodAccess:
    """Issues a token to each ServiceAccount that is used, and decides what its bearer may do."""

    def __init__(self, store: ObjectStore, server: str) -> None:
        """`server`: base URL of the pod API."""
        self._store = store
        self._server = server
        self._token_of: dict[ServiceAccount, str] = {}
        self._account_of: dict[str, ServiceAccount] = {}

    def kubeconfig(self, namespace: str, account_name: str) -> str:
        """A kubeconfig for pods of this account. JSON, which is also YAML."""
        token = self._token(ServiceAccount(namespace, account_name))
        context = {"cluster": "local", "user": account_name, "namespace": namespace}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "local",
                "clusters": [{"name": "local", "cluster": {"server": self._server}}],
                "users": [{"name": account_name, "user": {"token": token}}],
                "contexts": [{"name": "local", "context": context}],
            },
            indent=1,
        )

    def _token(self, account: ServiceAccount) -> str:
        if account not in self._token_of:
            token = self._token_of[account] = secrets.token_urlsafe(32)
            self._account_of[token] = account
        return self._token_of[account]

    def account_of(self, token: str) -> ServiceAccount | None:
        """Whose token this is; None if it is nobody's."""
        return self._account_of.get(token)

    def may(self, account: ServiceAccount, verb: str, resource: str, namespace: str) -> bool:
        """True if a Role bound to the account allows `verb` on `resource` of the core group in `namespace`."""
        return any(
            _names(rule, "apiGroups", "") and _names(rule, "resources", resource) and _names(rule, "verbs", verb)
            for rule in self._rules_of(account, namespace)
        )

    def _rules_of(self, account: ServiceAccount, namespace: str) -> Iterator[Mapping[str, Any]]:
        for binding in self._store.list("RoleBinding", namespace):
            if any(_is_account(subject, account, namespace) for subject in binding.get("subjects", ())):
                role = self._store.get(ObjectKey("Role", namespace, binding["roleRef"]["name"]))
                yield from (role or {}).get("rules", ())


def _is_account(subject: Mapping[str, Any], account: ServiceAccount, namespace: str) -> bool:
    return bool(
        subject["kind"] == "ServiceAccount"
        and subject["name"] == account.name
        and subject.get("namespace", namespace) == account.namespace
    )


def _names(rule: Mapping[str, Any], field: str, value: str) -> bool:
    return value in rule.get(field, ()) or "*" in rule.get(field, ())
