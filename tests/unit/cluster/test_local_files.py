"""What lies in the state directory: objects, the lock, volumes and logs."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from specserve_operator.cluster.local import leftovers, logs, procfs
from specserve_operator.cluster.local.podspec import PodConfigError
from specserve_operator.cluster.local.statedir import LogNotFound, StateDir, StateDirInUse, StateDirLock
from specserve_operator.cluster.local.store import ObjectKey, ObjectStore
from specserve_operator.cluster.local.volumes import (
    config_names,
    decode_config,
    materialise,
    mounts_of,
    write_config,
)
from specserve_operator.cluster.protocol import ClusterError


def config_map(name: str = "settings", **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_objects_are_read_back_by_another_process(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    store = ObjectStore(state)
    store.apply(config_map("b", x="1"))
    store.apply(config_map("a", x="2"))
    store.apply(config_map("gone"))
    store.delete(ObjectKey("ConfigMap", "default", "gone"))
    read = StateDir(tmp_path).list_objects("ConfigMap")
    assert [(o["metadata"]["name"], o["data"]["x"]) for o in read] == [("a", "2"), ("b", "1")]
    assert StateDir(tmp_path).list_objects("ConfigMap", "other") == []
    assert StateDir(tmp_path / "nothing").list_objects("Pod") == []


def test_second_owner_of_a_state_directory_is_refused(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    assert state.control_plane_pid() is None
    lock = StateDirLock.acquire(state)
    assert state.control_plane_pid() == os.getpid()
    with pytest.raises(StateDirInUse, match=rf"in use by the control plane of pid {os.getpid()}"):
        StateDirLock.acquire(state)
    lock.release()
    assert state.control_plane_pid() is None
    StateDirLock.acquire(state).release()


def test_lock_of_a_process_that_is_gone_means_nothing(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.lock.write_text(json.dumps({"pid": os.getpid(), "startTicks": 1}))
    assert state.control_plane_pid() is None
    state.lock.write_text("half a")
    assert state.control_plane_pid() is None


def test_state_directory_that_cannot_be_made_is_an_error_for_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="can't be used: Not a directory"):
        StateDirLock.acquire(StateDir(tmp_path / "file" / "state"))


def test_config_volume_changes_in_one_step(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    write_config(volume, {"state.json": b"1", "old": b"x"})
    assert (volume / "state.json").read_bytes() == b"1"
    first = os.readlink(volume / "..data")
    write_config(volume, {"state.json": b"2", "new": b"y"})
    assert (volume / "state.json").read_bytes() == b"2"
    assert sorted(p.name for p in volume.iterdir() if not p.name.startswith("..")) == ["new", "state.json"]
    assert not (volume / first).exists()
    assert os.readlink(volume / "..data") != first


def test_unchanged_config_volume_is_left_alone(tmp_path: Path) -> None:
    write_config(tmp_path / "v", {"a": b"1"})
    before = os.readlink(tmp_path / "v" / "..data")
    write_config(tmp_path / "v", {"a": b"1"})
    assert os.readlink(tmp_path / "v" / "..data") == before


def test_secrets_and_binary_data_are_decoded() -> None:
    encoded = base64.b64encode(b"\xff\x00").decode()
    assert decode_config({"kind": "Secret", "data": {"a": encoded}, "stringData": {"b": "t"}}) == {
        "a": b"\xff\x00",
        "b": b"t",
    }
    assert decode_config({"kind": "ConfigMap", "data": {"a": "1"}, "binaryData": {"b": encoded}}) == {
        "a": b"1",
        "b": b"\xff\x00",
    }


def pod_with(*volumes: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": "p", "namespace": "default", "uid": "u", "labels": {"role": "decode"}}
    return {"metadata": meta, "spec": {"volumes": list(volumes), "containers": []}}


def read_settings(kind: str, name: str) -> dict[str, bytes] | None:
    return {("ConfigMap", "settings"): {"a": b"1", "b": b"2"}, ("Secret", "s"): {"t": b"x"}}.get((kind, name))


def test_each_kind_of_volume_becomes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    pod = pod_with(
        {"name": "config", "configMap": {"name": "settings", "items": [{"key": "a", "path": "sub/a.txt"}]}},
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "host", "hostPath": {"path": str(tmp_path / "models")}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "drafts"}},
        {
            "name": "all",
            "projected": {
                "sources": [
                    {"configMap": {"name": "settings"}},
                    {"secret": {"name": "s"}},
                    {"downwardAPI": {"items": [{"path": "uid", "fieldRef": {"fieldPath": "metadata.uid"}}]}},
                ]
            },
        },
    )
    state = StateDir(tmp_path / "state")
    paths = materialise(pod, state, read_settings)
    assert (paths["config"] / "sub" / "a.txt").read_text() == "1"
    assert (paths["secret"] / "t").read_text() == "x"
    assert list(paths["scratch"].iterdir()) == []
    assert paths["host"] == tmp_path / "models"
    assert paths["claim"] == state.claims / "default" / "drafts"
    assert {p.name: p.read_text() for p in paths["all"].iterdir() if p.name[0] != "."} == {
        "a": "1",
        "b": "2",
        "t": "x",
        "uid": "u",
    }
    assert set(config_names(pod)) == {("ConfigMap", "settings"), ("Secret", "s")}


@pytest.mark.parametrize(
    ("volume", "complaint"),
    [
        ({"name": "v", "configMap": {"name": "no"}}, "ConfigMap no not found"),
        ({"name": "v", "configMap": {"name": "settings", "items": [{"key": "z", "path": "z"}]}}, "has no key z"),
        ({"name": "v", "hostPath": {"path": "/no/such/folder"}}, "volume v: /no/such/folder does not exist"),
        ({"name": "v", "csi": {}}, "volume v: a volume of kind csi"),
        ({"name": "v", "configMap": {}}, "volume v: name is missing"),
        ({"name": "v", "configMap": None}, "volume v is malformed"),
        ({"name": "v", "secret": {}}, "volume v: name is missing"),
        ({"name": "v", "hostPath": {}}, "volume v: path is missing"),
        ({"emptyDir": {}}, "volume without a name: name is missing"),
    ],
)
def test_volume_that_cannot_be_made_is_named(tmp_path: Path, volume: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PodConfigError, match=complaint):
        materialise(pod_with(volume), StateDir(tmp_path), read_settings)


def test_optional_config_that_is_missing_is_an_empty_folder(tmp_path: Path) -> None:
    volume = {"name": "v", "configMap": {"name": "no", "optional": True}}
    paths = materialise(pod_with(volume), StateDir(tmp_path), read_settings)
    assert [p.name for p in paths["v"].iterdir() if not p.name.startswith("..")] == []


def test_mount_points_lead_into_volumes() -> None:
    container = {"name": "engine", "volumeMounts": [{"name": "v", "mountPath": "/data", "subPath": "x"}]}
    assert mounts_of(container, {"v": Path("/l")})[0].local_path == Path("/l/x")
    with pytest.raises(PodConfigError, match="volumeMounts of container engine: mountPath is missing"):
        mounts_of({"name": "engine", "volumeMounts": [{"name": "v"}]}, {"v": Path("/l")})
    with pytest.raises(PodConfigError, match="container engine mounts v, which is no volume"):
        mounts_of(container, {})


def test_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    logs.start_new(tmp_path, "engine").write_text("first\n")
    logs.start_new(tmp_path, "engine").write_text("second\n")
    assert logs.read(logs.path_of(tmp_path, "engine")) == "second\n"
    assert logs.read(logs.path_of(tmp_path, "engine", previous=True)) == "first\n"
    assert logs.containers_in(tmp_path) == ["engine"]


def test_log_tail() -> None:
    path = Path(__file__)
    lines = path.read_text().splitlines(keepends=True)
    assert logs.read(path, 2) == "".join(lines[-2:])
    assert logs.read(path, 0) == ""


def test_termination_message_is_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert logs.termination_message(log) == ""
    log.write_text("x" * 5000 + "\nRuntimeError: no model\n")
    message = logs.termination_message(log)
    assert message.endswith("x\nRuntimeError: no model")
    assert len(message) < 2048


def test_log_past_its_limit_starts_anew_in_place(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("12345")
    logs.limit_size(tmp_path, "engine", 5)
    assert log.read_text() == "12345"
    with log.open("a") as container:
        container.write("6")
        container.flush()
        logs.limit_size(tmp_path, "engine", 5)
        assert log.read_text() == ""
        container.write("7")
    assert log.read_text() == "7"
    assert logs.path_of(tmp_path, "engine", previous=True).read_text() == "123456"


def test_log_that_is_not_there_is_explained(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    folder = state.pod("default", "coder-1")
    folder.mkdir(parents=True)
    with pytest.raises(LogNotFound, match="no pod coder-2 in namespace default; there is: coder-1"):
        state.read_log("default", "coder-2")
    with pytest.raises(LogNotFound, match="name a container: none yet"):
        state.read_log("default", "coder-1")
    (folder / "a.log").write_text("1\n")
    assert state.read_log("default", "coder-1") == "1\n"
    (folder / "b.log").write_text("2\n")
    with pytest.raises(LogNotFound, match="name a container: a, b"):
        state.read_log("default", "coder-1")
    with pytest.raises(LogNotFound, match="container a of pod coder-1 has no earlier run"):
        state.read_log("default", "coder-1", container="a", previous=True)


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "ConfigMap"}', "\x00"])
def test_damaged_object_file_is_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    path = tmp_path / "objects" / "ConfigMap" / "default" / "a.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ClusterError, match=rf"{path} is damaged .*: remove it") as caught:
        StateDir(tmp_path).list_objects("ConfigMap")
    assert not caught.value.retryable


async def test_followed_log_ends_with_what_was_written_when_its_pod_is_gone(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    store = ObjectStore(state)
    store.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {}})
    log = state.pod("default", "p") / "engine.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    lines = state.follow_log("default", "p")
    async with asyncio.timeout(5):
        assert await anext(lines) == "first\n"
        with log.open("a") as container:
            container.write("last\n")
        store.remove(ObjectKey("Pod", "default", "p"))
        assert [line async for line in lines] == ["last\n"]


def test_pid_note_of_another_boot_means_nothing(tmp_path: Path) -> None:
    note = {"pid": 1, "startTicks": 2, "shim": 3}
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(note | {"boot": procfs.boot_id()}))
    assert leftovers.read_pid_note(path) == leftovers.PidNote(1, 2, 3)
    path.write_text(json.dumps(note | {"boot": "another"}))
    assert leftovers.read_pid_note(path) is None
    path.write_text(json.dumps(note))
    assert leftovers.read_pid_note(path) is None
