"""Transfer parameters: what the producer writes the consumer reads, and nothing else gets through."""

import hashlib
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_workers.kv.errors import BadParamsError
from specserve_workers.kv.params import RemoteDecode, RemotePrefill, prompt_sha256

PREFILL = RemotePrefill(
    lease=bytes(range(16)),
    host="10.1.2.3",
    port=9100,
    tensor_parallel_size=2,
    revision="abc",
    prompt_tokens=70,
    prompt_sha256=b"\7" * 32,
    num_blocks=3,
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_params_survive_json_form() -> None:
    assert RemotePrefill.from_params(PREFILL.to_params()) == PREFILL


def test_params_have_the_fields_of_the_contract() -> None:
    assert PREFILL.to_params() == {
        "do_remote_prefill": True,
        "lease": "000102030405060708090a0b0c0d0e0f",
        "host": "10.1.2.3",
        "port": 9100,
        "tensor_parallel_size": 2,
        "revision": "abc",
        "prompt_tokens": 70,
        "prompt_sha256": "07" * 32,
        "num_blocks": 3,
    }


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": 1}, [], "x"])
def test_requests_without_remote_prefill_have_no_source(params: object) -> None:
    assert RemotePrefill.from_params(params) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease", "00" * 15),
        ("lease", "00" * 17),
        ("lease", "zz" * 16),
        ("lease", "AB" * 16),
        ("lease", None),
        ("lease", 5),
        ("host", "unix:/tmp/x"),
        ("host", "http://h"),
        ("host", "h:80"),
        ("host", "a b"),
        ("host", ""),
        ("host", "a" * 254),
        ("port", 0),
        ("port", 65535),  # rank 1 would be beyond the last port
        ("port", True),
        ("port", "9100"),
        ("tensor_parallel_size", 0),
        ("revision", "r" * 257),
        ("prompt_tokens", -1),
        ("prompt_tokens", 2**60),
        ("prompt_sha256", "00"),
        ("num_blocks", 0),
    ],
)
def test_bad_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadParamsError, match=field):
        RemotePrefill.from_params({**PREFILL.to_params(), field: value})


@pytest.mark.parametrize("host", ["::1", "fd00::12", "prefill-0.ns.svc.cluster.local", "localhost"])
def test_addresses_and_names_are_accepted(host: str) -> None:
    source = RemotePrefill.from_params({**PREFILL.to_params(), "host": host})
    assert source is not None
    assert source.host == host


@settings(deadline=None)
@given(st.sampled_from(sorted(PREFILL.to_params())), JSON_VALUES)
def test_any_value_in_any_field_is_read_or_refused(field: str, value: object) -> None:
    params = {**PREFILL.to_params(), field: value}
    try:
        source = RemotePrefill.from_params(params)
    except BadParamsError:
        return
    assert source is None or source.to_params() == params


@settings(deadline=None)
@given(JSON_VALUES)
def test_any_json_is_read_or_refused(value: object) -> None:
    for params in (value, {"do_remote_prefill": True, "lease": value}, {"do_remote_decode": True, "pulls": value}):
        for kind in (RemotePrefill, RemoteDecode):
            with suppress(BadParamsError):
                kind.from_params(params)  # type: ignore[arg-type]


def test_remote_decode_defaults_to_one_pull() -> None:
    assert RemoteDecode.from_params({"do_remote_decode": True}) == RemoteDecode(pulls=1)
    assert RemoteDecode.from_params({"do_remote_decode": True, "pulls": 3}) == RemoteDecode(pulls=3)
    assert RemoteDecode.from_params({"pulls": 3}) is None


@pytest.mark.parametrize("pulls", [0, -1, 1025, True, "2", None])
def test_pulls_out_of_bounds_are_refused(pulls: object) -> None:
    with pytest.raises(BadParamsError, match="pulls"):
        RemoteDecode.from_params({"do_remote_decode": True, "pulls": pulls})


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_hash_is_of_little_endian_int32(ids: list[int]) -> None:
    assert prompt_sha256(ids) == hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).digest()
