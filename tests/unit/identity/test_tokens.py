"""ServiceAccount tokens: only those that this cluster has made, for us, for a pod, are believed."""

import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from specserve_operator.identity.certificates import new_key
from specserve_operator.identity.issuer_keys import (
    CONFIGURATION_PATH,
    KEYS_PATH,
    REFRESH_SECONDS,
    UNKNOWN_KEY_SECONDS,
    IssuerKeys,
    KeysUnavailableError,
    read_key_set,
)
from specserve_operator.identity.names import TOKEN_AUDIENCE
from specserve_operator.identity.tokens import MAX_TOKEN_CHARACTERS, PodClaims, TokenError, TokenVerifier
from tests.unit.identity.builders import (
    DECODE,
    ISSUER,
    START,
    Clock,
    FakeIssuer,
    pod_claims,
    public_jwk,
    raw_token,
)

NOW = int(START.timestamp())
CLAIMS = PodClaims("llm", "coder-decode-1", DECODE.uid, "default")


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads the clock by itself."""

    class FixedDatetime(jwt.api_jwt.datetime):  # type: ignore[name-defined,misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return START.astimezone(tz)

    monkeypatch.setattr(jwt.api_jwt, "datetime", FixedDatetime)


def verifier_for(issuer: FakeIssuer, clock: Clock | None = None) -> TokenVerifier:
    clock = clock or Clock()
    return TokenVerifier(IssuerKeys(issuer, clock.seconds), audience=TOKEN_AUDIENCE)


async def refusal(issuer: FakeIssuer, token: str) -> str:
    with pytest.raises(TokenError) as caught:
        await verifier_for(issuer).verify(token)
    return str(caught.value)


async def test_a_pods_token_says_who_the_pod_is() -> None:
    issuer = FakeIssuer()
    assert await verifier_for(issuer).verify(issuer.token()) == CLAIMS


async def test_a_token_with_rsa_keys_is_taken_too() -> None:
    key = rsa.generate_private_key(65537, 2048)
    document = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())) | {"kid": "rsa", "alg": "RS256"}
    issuer = FakeIssuer(documents={KEYS_PATH: {"keys": [document]}})
    token = jwt.encode(pod_claims(), key, algorithm="RS256", headers={"kid": "rsa"})
    assert await verifier_for(issuer).verify(token) == CLAIMS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exp": NOW - 11}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "not valid"),
        ({"iat": None}, "iat"),
        ({"iat": NOW + 60}, "not yet valid"),
        ({"nbf": NOW + 60}, "not yet valid"),
        ({"aud": ["https://kubernetes.default.svc"]}, "audience"),
        ({"aud": TOKEN_AUDIENCE + "/x"}, "audience"),
        ({"aud": None}, "aud"),
        ({"aud": {}}, "aud"),
        ({"aud": 5}, "aud"),
        ({"aud": [5]}, "aud"),
        ({"iss": "https://elsewhere"}, "issuer"),
        ({"iss": None}, "iss"),
        ({"kubernetes.io": None}, "not bound to a pod"),
        ({"kubernetes.io": "llm"}, "not bound to a pod"),
        ({"kubernetes.io": {"namespace": "llm", "serviceaccount": {"name": "default"}}}, "not bound to a pod"),
        ({"kubernetes.io": {"namespace": "llm", "pod": {"name": "a"}, "serviceaccount": {"name": "b"}}}, "not bound"),
        ({"kubernetes.io": {"namespace": 1, "pod": {"name": "a", "uid": "b"}, "serviceaccount": {"name": "c"}}}, "not"),
        ({"kubernetes.io": {"namespace": "n", "pod": ["a"], "serviceaccount": {"name": "c"}}}, "not bound to a pod"),
    ],
)
async def test_a_token_that_is_not_a_pods_or_not_for_us_is_refused(changes: dict[str, Any], reason: str) -> None:
    issuer = FakeIssuer()
    assert reason in await refusal(issuer, issuer.token(**changes))


async def test_a_token_for_several_audiences_is_taken_if_we_are_one() -> None:
    issuer = FakeIssuer()
    assert await verifier_for(issuer).verify(issuer.token(aud=["https://a", TOKEN_AUDIENCE])) == CLAIMS


async def test_a_forged_signature_is_refused() -> None:
    issuer, forger = FakeIssuer(), FakeIssuer()
    assert "not valid" in await refusal(issuer, forger.token())
    good = issuer.token()
    header, payload, signature = good.split(".")
    other = issuer.token(sub="system:serviceaccount:llm:admin").split(".")[1]
    assert "not valid" in await refusal(issuer, f"{header}.{other}.{signature}")
    assert "not valid" in await refusal(issuer, f"{header}.{payload}.")


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "HS256", "PS256", "EdDSA", "", 7, None, ["ES256"]])
async def test_no_algorithm_but_those_of_the_cluster_is_taken(algorithm: Any) -> None:
    issuer = FakeIssuer()
    await refusal(issuer, raw_token({"alg": algorithm, "kid": "key-1"}, pod_claims()))


async def test_the_public_key_is_no_shared_secret() -> None:
    """The oldest trick: the published key as an HMAC secret."""
    issuer = FakeIssuer()
    key = issuer.keys["key-1"].public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    secret = key.public_bytes(serialization.Encoding.PEM, form)
    jws = jwt.api_jws.PyJWS()
    jws._algorithms["HS256"].prepare_key = lambda key: key  # type: ignore[method-assign]
    token = jws.encode(json.dumps(pod_claims()).encode(), secret, algorithm="HS256", headers={"kid": "key-1"})
    assert "header" in await refusal(issuer, token)


async def test_a_token_of_another_algorithm_than_its_keys_is_refused() -> None:
    issuer = FakeIssuer()
    key = rsa.generate_private_key(65537, 2048)
    token = jwt.encode(pod_claims(), key, algorithm="RS256", headers={"kid": "key-1"})
    assert "not valid" in await refusal(issuer, token)


@pytest.mark.parametrize(
    "headers",
    [
        {"jwk": {"kty": "EC"}},
        {"jku": "https://evil/keys"},
        {"x5u": "https://evil/cert"},
        {"x5c": ["x"]},
        {"crit": ["exp"]},
        {"b64": False, "crit": ["b64"]},
        {"cty": "JWT"},
    ],
)
async def test_a_header_that_kubernetes_would_not_write_is_refused(headers: dict[str, Any]) -> None:
    issuer = FakeIssuer()
    token = raw_token({"alg": "ES256", "kid": "key-1"} | headers, pod_claims(), b"x" * 64)
    await refusal(issuer, token)
    assert issuer.reads == 0


@pytest.mark.parametrize("key_id", [None, "", 1, ["key-1"], {"a": 1}, "k" * 257, "../key-1", "key-1\x00", "KEY-1"])
async def test_a_key_id_is_only_looked_up_among_the_keys_there_are(key_id: Any) -> None:
    issuer = FakeIssuer()
    header = {"alg": "ES256", "kid": key_id} if key_id is not None else {"alg": "ES256"}
    await refusal(issuer, raw_token(header, pod_claims(), b"x" * 64))


async def test_an_oversized_token_is_refused_before_it_is_read() -> None:
    issuer = FakeIssuer()
    assert "characters" in await refusal(issuer, "a" * (MAX_TOKEN_CHARACTERS + 1))
    assert issuer.reads == 0


@given(st.text(max_size=300) | st.lists(st.text(alphabet="abcAB_-019=", max_size=60), max_size=5).map(".".join))
async def test_whatever_is_no_token_is_refused_by_name(token: str) -> None:
    await refusal(FakeIssuer(), token)


async def test_new_keys_are_read_for_a_token_that_names_one() -> None:
    issuer, clock = FakeIssuer(), Clock()
    verifier = verifier_for(issuer, clock)
    await verifier.verify(issuer.token())
    issuer.keys["key-2"] = new_key()
    clock.go(seconds=UNKNOWN_KEY_SECONDS)
    assert await verifier.verify(issuer.token(key_id="key-2")) == CLAIMS
    assert issuer.reads == 2


async def test_unknown_keys_do_not_make_us_read_all_the_time() -> None:
    issuer, clock = FakeIssuer(), Clock()
    verifier = verifier_for(issuer, clock)
    stranger = FakeIssuer(keys={"other": new_key()})
    for _ in range(50):
        with pytest.raises(TokenError, match="key that this cluster does not have"):
            await verifier.verify(stranger.token(key_id="other"))
    assert issuer.reads == 1
    await verifier.verify(issuer.token())
    assert issuer.reads == 1


async def test_a_key_that_the_cluster_has_withdrawn_is_forgotten_within_the_hour() -> None:
    issuer, clock = FakeIssuer(), Clock()
    verifier = verifier_for(issuer, clock)
    token = issuer.token()
    await verifier.verify(token)
    issuer.keys = {"key-2": new_key()}
    clock.go(seconds=REFRESH_SECONDS - 1)
    await verifier.verify(token)
    clock.go(seconds=1)
    with pytest.raises(TokenError, match="key"):
        await verifier.verify(token)


async def test_known_keys_serve_while_the_api_server_is_away() -> None:
    issuer, clock = FakeIssuer(), Clock()
    verifier = verifier_for(issuer, clock)
    await verifier.verify(issuer.token())
    issuer.is_down = True
    clock.go(seconds=REFRESH_SECONDS)
    assert await verifier.verify(issuer.token()) == CLAIMS


async def test_without_any_keys_nobody_is_refused_for_good() -> None:
    issuer = FakeIssuer(is_down=True)
    verifier = verifier_for(issuer)
    for _ in range(2):
        with pytest.raises(KeysUnavailableError):
            await verifier.verify(issuer.token())


@pytest.mark.parametrize(
    "documents",
    [
        {CONFIGURATION_PATH: []},
        {CONFIGURATION_PATH: {"issuer": ""}},
        {CONFIGURATION_PATH: {"issuer": 5}},
        {KEYS_PATH: {}},
        {KEYS_PATH: {"keys": "x"}},
        {KEYS_PATH: None},
    ],
)
async def test_documents_that_are_none_count_as_unavailable(documents: dict[str, Any]) -> None:
    issuer = FakeIssuer(documents=documents)
    with pytest.raises(KeysUnavailableError):
        await verifier_for(issuer).verify(issuer.token())


def test_keys_of_other_kinds_are_left_out() -> None:
    good = public_jwk("good", new_key())
    others = [
        good | {"kid": "hmac", "kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
        {"kid": "oct-without-alg", "kty": "oct", "k": "c2VjcmV0"},
        {"kid": "broken", "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "alg": "ES256"},
        {"kid": 5, "kty": "EC"},
        {"kty": "EC"},
        good | {"kid": "pss", "alg": "PS256"},
    ]
    found = read_key_set({"issuer": ISSUER}, {"keys": [*others, good]})
    assert set(found.keys) == {"good"}
