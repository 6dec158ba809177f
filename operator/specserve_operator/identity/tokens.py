"""Who a ServiceAccount token belongs to. A token is a stranger's word until its signature is checked."""

from dataclasses import dataclass
from typing import Any, Final

import jwt

from specserve_operator.identity.issuer_keys import ALGORITHMS, IssuerKeys

# Real ones have some 1,200 characters.
MAX_TOKEN_CHARACTERS: Final = 8192
MAX_KEY_ID_CHARACTERS: Final = 256
# Clocks of nodes differ.
LEEWAY_SECONDS: Final = 10.0

# All that Kubernetes writes. Others change what is signed, or where a careless reader takes the key from.
_HEADERS: Final = frozenset({"alg", "kid", "typ"})


class TokenError(Exception):
    """A token that proves nothing. The message is for its sender and says nothing about others."""


@dataclass(frozen=True, slots=True)
class PodClaims:
    """The pod that a token was given to, and lives as long as."""

    namespace: str
    pod_name: str
    pod_uid: str
    service_account: str


class TokenVerifier:
    """Checks tokens for one audience."""

    def __init__(self, keys: IssuerKeys, *, audience: str) -> None:
        self._keys = keys
        self._audience = audience

    async def verify(self, token: str) -> PodClaims:
        """The pod that the token belongs to. Raises `TokenError`, `KeysUnavailableError`."""
        found = await self._keys.find(_key_id(token))
        if found is None:
            raise TokenError("the token is signed with a key that this cluster does not have")
        issuer, key = found
        try:
            claims = jwt.decode(
                token,
                # With it comes the one algorithm that goes with it: the token's own word is only compared.
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "iss", "aud"], "strict_aud": False},
            )
        except jwt.ExpiredSignatureError as error:
            raise TokenError("the token has expired") from error
        except jwt.InvalidAudienceError as error:
            raise TokenError(f"the token is not for the audience {self._audience}") from error
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise TokenError(f"the token is not valid: {error}") from error
        return _pod_claims(claims)


def _key_id(token: str) -> str:
    """What the token says about its key. Raises `TokenError` for a header that Kubernetes would not write."""
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise TokenError(f"the token has more than {MAX_TOKEN_CHARACTERS} characters")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
        raise TokenError("the token is not a signed JSON web token") from error
    if not set(header) <= _HEADERS or header.get("alg") not in ALGORITHMS:
        raise TokenError("the token's header is not that of a ServiceAccount token")
    key_id = header.get("kid")
    if not isinstance(key_id, str) or not 0 < len(key_id) <= MAX_KEY_ID_CHARACTERS:
        raise TokenError("the token does not name its key")
    return key_id


def _pod_claims(claims: dict[str, Any]) -> PodClaims:
    """Raises `TokenError` for a token that is bound to no pod."""
    bound = claims.get("kubernetes.io")
    bound = bound if isinstance(bound, dict) else {}
    pod, account = bound.get("pod"), bound.get("serviceaccount")
    values = (
        bound.get("namespace"),
        pod.get("name") if isinstance(pod, dict) else None,
        pod.get("uid") if isinstance(pod, dict) else None,
        account.get("name") if isinstance(account, dict) else None,
    )
    if not all(isinstance(value, str) and value for value in values):
        raise TokenError("the token is not bound to a pod: it must come from a projected volume")
    return PodClaims(*(str(value) for value in values))
