from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_workers.frontend.disaggregation import (
    NotHeldError,
    RevisionMismatchError,
    TransferAnswerError,
    find_transfer_params,
    is_prefill_order,
    is_remote,
    parse_transfer_answer,
    prefill_body,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "def main():\n    return 0\n" * 4
PARAMS = {
    "do_remote_prefill": True,
    "lease": "0123456789abcdef" * 2,
    "host": "10.0.0.7",
    "port": 9100,
    "tensor_parallel_size": 2,
    "revision": "t1",
    "prompt_tokens": 40,
    "prompt_sha256": "ab" * 32,
    "num_blocks": 2,
}


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": [LONG]}),
        (COMPLETIONS, {"prompt": list(range(32))}),
        (COMPLETIONS, {"prompt": [list(range(32))]}),
        (COMPLETIONS, {"prompt": LONG, "n": 3, "stream": True, "logprobs": 2, "echo": False}),
        (COMPLETIONS, {"prompt": "ä" * 16}),
        (CHAT, chat(LONG)),
        (CHAT, chat([{"type": "text", "text": LONG}])),
        (CHAT, chat("hi", tools=[{"type": "function", "function": {"name": "f", "description": LONG}}])),
        (CHAT, chat(LONG, response_format={"type": "json_object"}, n=2)),
    ],
)
def test_a_single_long_prompt_is_prefilled_remotely(path: str, body: dict[str, Any]):
    assert is_remote(path, body, block_size_tokens=32)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": LONG}),
        ("/tokenize", {"prompt": LONG}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": 7}),
        (COMPLETIONS, {"prompt": [LONG, LONG]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4]]}),
        (COMPLETIONS, {"prompt": "x" * 31}),
        (COMPLETIONS, {"prompt": list(range(31))}),
        (COMPLETIONS, {"prompt": LONG, "echo": True}),
        (COMPLETIONS, {"prompt": LONG, "prompt_logprobs": 0}),
        (COMPLETIONS, {"prompt": LONG, "prompt_embeds": "xx"}),
        (COMPLETIONS, {"prompt": LONG, "use_beam_search": True}),
        (COMPLETIONS, {"prompt": LONG, "n": 0}),
        (COMPLETIONS, {"prompt": LONG, "n": "2"}),
        (COMPLETIONS, {"prompt": LONG, "n": 1000}),
        (CHAT, chat("hi")),
        (CHAT, {"messages": LONG}),
        (CHAT, chat([{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "x"}}])),
    ],
)
def test_everything_else_is_served_locally(path: str, body: dict[str, Any]):
    assert not is_remote(path, body, block_size_tokens=32)


def test_the_prefill_body_keeps_the_prompt_and_asks_for_one_token():
    body = {"model": "m", "prompt": LONG, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64}
    body |= {"n": 3, "min_tokens": 5, "logprobs": 2, "stop": ["x"], "temperature": 0.7, "add_special_tokens": False}
    assert prefill_body(COMPLETIONS, body) == {
        "model": "m",
        "prompt": LONG,
        "add_special_tokens": False,
        "stream": False,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True, "pulls": 3},
    }


def test_the_prefill_body_of_a_chat_keeps_what_shapes_its_prompt():
    body = chat(LONG, tools=[{"type": "function"}], tool_choice="auto", chat_template_kwargs={"a": 1}, max_tokens=9)
    derived = prefill_body(CHAT, body | {"response_format": {"type": "json_object"}, "max_completion_tokens": 9})
    assert derived["tools"] == [{"type": "function"}]
    assert derived["tool_choice"] == "auto"
    assert derived["chat_template_kwargs"] == {"a": 1}
    assert derived["max_completion_tokens"] == 1
    assert "max_tokens" not in derived
    assert "response_format" not in derived


@given(st.dictionaries(st.sampled_from(["n", "stop", "stream", "max_tokens", "seed", "user"]), st.integers(1, 9)))
def test_deriving_a_prefill_body_leaves_the_request_alone(fields: dict[str, int]):
    body = {"prompt": LONG, **fields}
    before = dict(body)
    assert prefill_body(COMPLETIONS, body)["prompt"] == LONG
    assert body == before


def test_a_good_answer_names_every_rank():
    params = parse_transfer_answer({"kv_transfer_params": PARAMS}, revision="t1")
    assert params.rank_addresses == ["10.0.0.7:9100", "10.0.0.7:9101"]
    assert params.lease == bytes.fromhex("0123456789abcdef" * 2)


def test_addresses_of_the_newer_protocol_stand_in_brackets():
    params = parse_transfer_answer({"kv_transfer_params": PARAMS | {"host": "fd00::7"}}, revision="t1")
    assert params.rank_addresses[0] == "[fd00::7]:9100"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"lease": "00"}, "lease"),
        ({"lease": "0123456789ABCDEF" * 2}, "lease"),
        ({"lease": None}, "lease"),
        ({"host": ""}, "host"),
        ({"host": 7}, "host"),
        ({"port": 0}, "port"),
        ({"port": True}, "port"),
        ({"port": 70000}, "port"),
        ({"tensor_parallel_size": 1000000}, "tensor_parallel_size"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"num_blocks": "2"}, "num_blocks"),
    ],
)
def test_an_answer_with_a_wrong_field_is_refused_by_name(change: dict[str, Any], named: str):
    with pytest.raises(TransferAnswerError, match=named):
        parse_transfer_answer({"kv_transfer_params": PARAMS | change}, revision="t1")


@pytest.mark.parametrize("answer", [None, [], "x", {"kv_transfer_params": 7}])
def test_an_answer_of_another_form_is_refused(answer: Any):
    with pytest.raises(TransferAnswerError):
        parse_transfer_answer(answer, revision="t1")


def test_an_answer_without_parameters_means_that_nothing_is_held():
    with pytest.raises(NotHeldError):
        parse_transfer_answer({"kv_transfer_params": None}, revision="t1")


def test_a_peer_of_another_target_revision_is_told_apart():
    with pytest.raises(RevisionMismatchError, match="t1"):
        parse_transfer_answer({"kv_transfer_params": PARAMS}, revision="t2")


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": {"x": 1}},
        {"kv_transfer_params": {}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"extra_args": {"kv_transfer_params": {"x": 1}}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": {"x": 1}}}},
    ],
)
def test_transfer_parameters_are_found_wherever_the_engine_takes_them(body: dict[str, Any]):
    assert len(find_transfer_params(body)) == 1


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "kv_transfer_params",
        {"kv_transfer_params": None},
        chat('{"kv_transfer_params": {}}'),
        {"vllm_xargs": 1},
    ],
)
def test_a_request_without_transfer_parameters_has_none(body: Any):
    assert find_transfer_params(body) == []


@pytest.mark.parametrize(
    ("params", "accepted"),
    [
        ({"do_remote_decode": True, "pulls": 1}, True),
        ({"do_remote_decode": True, "pulls": 128}, True),
        ({"do_remote_decode": True, "pulls": 0}, False),
        ({"do_remote_decode": True, "pulls": 129}, False),
        ({"do_remote_decode": True, "pulls": True}, False),
        ({"do_remote_decode": 1, "pulls": 1}, False),
        ({"do_remote_decode": True}, False),
        ({"do_remote_decode": True, "pulls": 1, "host": "x"}, False),
        ({"do_remote_prefill": True, "lease": "0" * 32}, False),
        ("x", False),
    ],
)
def test_a_prefill_pod_takes_orders_of_one_form_only(params: Any, accepted: bool):
    assert is_prefill_order(params) is accepted


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, None, 3])
def test_a_part_whose_type_is_no_name_is_not_prefilled_remotely(kind: Any):
    body = chat([{"type": kind, "text": LONG}])
    assert not is_remote(CHAT, body, block_size_tokens=32)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "kv_transfer_params", "vllm_xargs", "extra_args", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_PARTS = st.lists(st.fixed_dictionaries({"type": _JSON | st.lists(_JSON, max_size=1)}), min_size=1, max_size=2)
_MESSAGES = st.lists(st.fixed_dictionaries({"content": _JSON | _PARTS}), min_size=1, max_size=2)
_FIELDS = ["prompt", "messages", "tools", "n", "echo", "prompt_logprobs", "use_beam_search", "vllm_xargs", "extra_args"]
_BODY = st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5) | st.fixed_dictionaries(
    {"messages": _MESSAGES}, optional={"tools": _JSON, "vllm_xargs": _JSON}
)


@given(path=st.sampled_from([COMPLETIONS, CHAT, "/v1/responses"]), body=_BODY)
def test_no_json_body_makes_the_front_end_fail(path: str, body: dict[str, Any]):
    assert is_remote(path, body, block_size_tokens=1) in (True, False)
    assert prefill_body(path, body)["stream"] is False
    assert isinstance(find_transfer_params(body), list)


@given(body=_JSON)
def test_any_json_value_can_be_searched_for_transfer_parameters(body: Any):
    assert isinstance(find_transfer_params(body), list)
