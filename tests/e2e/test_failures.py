"""What a user notices when pods die: with a prefill pod gone nothing, with a decode pod gone as little as can be.

In this order: what a test has killed is still starting again in the next one, which does not need it.
"""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import LocalService, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(service: LocalService, prompts: list[str]) -> dict[str, str]:
    """Greedy texts of the undisturbed service; tests/engine holds that they are those of a plain engine."""
    return {prompt: service.complete(prompt) for prompt in prompts[:12]}


def complete_all(service: LocalService, prompts: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(prompts, pool.map(service.complete, prompts), strict=True))


def test_kv_is_moved_for_every_prompt(service: LocalService, reference: dict[str, str]) -> None:
    eventually(lambda: sum(service.kv_counts()) >= len(reference), timeout_seconds=30, what="all requests counted")
    transfers, fallbacks = service.kv_counts()
    assert (transfers, fallbacks) == (len(reference), 0)
    assert service.status()["kvTransfer"]["bytes"] > 0


def test_prefill_killed_between_requests_is_not_noticed_and_transfer_resumes(
    service: LocalService, reference: dict[str, str], prompts: list[str]
) -> None:
    (pod,) = service.pods("prefill")
    _, fallbacks_before = service.kv_counts()
    service.kill(pod)
    assert complete_all(service, list(reference)) == reference
    eventually(
        lambda: service.kv_counts()[1] > fallbacks_before, timeout_seconds=30, what="fallbacks counted in the status"
    )
    assert "KVTransferFallback" in service.event_reasons()

    service.wait_restarted(pod)
    # Prompts that no decode pod has in its prefix cache: the others would need no transfer.
    fresh = prompts[len(reference) :]
    transfers_before, fallbacks_before = service.kv_counts()
    texts = complete_all(service, fresh)
    eventually(
        lambda: service.kv_counts()[0] >= transfers_before + len(fresh), timeout_seconds=30, what="transfers again"
    )
    assert service.kv_counts()[1] == fallbacks_before
    assert complete_all(service, fresh) == texts


def test_prefill_killed_while_it_works_changes_no_text(service: LocalService, reference: dict[str, str]) -> None:
    (pod,) = service.pods("prefill")
    # Stopped first, so that the kill falls into the middle of the calls and not between them.
    service.kill(pod, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(complete_all, service, list(reference))
        time.sleep(1.0)
        service.kill(pod)
        assert answers.result() == reference


def test_decode_killed_before_the_first_token_costs_no_request(
    service: LocalService, reference: dict[str, str]
) -> None:
    killed = service.pods("decode")[0]
    # Stopped first, so that the kill meets requests that wait for their first token.
    service.kill(killed, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(complete_all, service, list(reference))
        time.sleep(1.0)
        service.kill(killed)
        assert answers.result() == reference
    assert complete_all(service, list(reference)) == reference


def read_and_kill(service: LocalService, body: dict[str, object], received: bytearray) -> None:
    """Reads a stream into `received` and kills all decode pods at its first chunk."""
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for chunk in response.iter_raw():
            if not received:
                for pod in service.pods("decode"):
                    service.kill(pod)
            received += chunk


def test_stream_cut_in_the_middle_ends_with_an_error(service: LocalService, prompts: list[str]) -> None:
    body: dict[str, object] = {"model": service.name, "prompt": prompts[0], "temperature": 0}
    body |= {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    received = bytearray()
    with pytest.raises(httpx.HTTPError):
        read_and_kill(service, body, received)
    assert received, "the stream had begun"
    assert b"[DONE]" not in received


def test_everything_that_was_killed_comes_back(service: LocalService, reference: dict[str, str]) -> None:
    for pod in (*service.pods("prefill"), *service.pods("decode")):
        service.wait_restarted(pod)
    assert complete_all(service, list(reference)) == reference
