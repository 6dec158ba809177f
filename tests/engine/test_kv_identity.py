"""KV that crosses the wire under certificates: the engine's processes take them from the pod's files as they come.

The engine pulls from itself, so its certificate says decode pod to servers and prefill pod to clients.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve_workers.identity.material import MaterialFiles
from tests.engine.conftest import Models, prompt_of
from tests.engine.kv_engine import Change, KvEngine, running_engine
from tests.unit.identity.builders import DECODE, PREFILL, certify_again, make_authority

PROMPT = prompt_of(7, 100)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def engine(models: Models, engine_environment: None, directory: Path) -> Iterator[KvEngine]:
    identity = {"identity_directory": str(directory), "namespace": DECODE.namespace, "service": DECODE.service}
    with running_engine(models, identity=identity) as engine:
        yield engine


def test_kv_moves_from_the_moment_that_there_is_a_certificate_and_under_every_later_one(
    engine: KvEngine, directory: Path
) -> None:
    text = engine.decode([PROMPT], [None], max_tokens=16)
    change = Change(engine)
    assert engine.decode([PROMPT], [engine.hold(PROMPT)], max_tokens=16) == text
    assert (change["fallbacks"], change["remote_prefills"]) == ({"no_identity": 1}, 0)
    engine.settle()

    files, authority = MaterialFiles(directory), make_authority()
    for signer in (authority, authority, make_authority()):
        change = Change(engine)
        certify_again(files, DECODE.uri, signer, hosts=PREFILL.hosts)
        assert engine.decode([PROMPT], [engine.hold(PROMPT)], max_tokens=16) == text
        assert (change["fallbacks"], change["remote_prefills"]) == ({}, 1)
    engine.settle()

    # Another service's pod: it shows its certificate, and gets nothing.
    change = Change(engine)
    stranger = DECODE.uri.replace("/service/coder/", "/service/other/")
    certify_again(files, stranger, authority, hosts=PREFILL.hosts)
    assert engine.decode([PROMPT], [engine.hold(PROMPT)], max_tokens=16) == text
    assert (change["fallbacks"], change["remote_prefills"]) == ({"producer_error": 1}, 0)
    engine.settle()
