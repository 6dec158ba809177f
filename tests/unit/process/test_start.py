"""Starting and ending the process: flags that do not fit, and signals at any time."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FLAGS = ("--default-engine-image=engine:1", "--gateway-image=gateway:1", "--health-port=0", "--metrics-port=0")


def run_operator(*flags: str, kubeconfig: Path) -> "subprocess.Popen[str]":
    source = ":".join(str(ROOT / folder) for folder in ("operator", "workers", "protos"))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": source, "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", "specserve_operator", *FLAGS, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def write_kubeconfig(path: Path, server: str) -> Path:
    cluster = {"name": "c", "cluster": {"server": server}}
    user = {"name": "u", "user": {"token": "t"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
    path.write_text(yaml.safe_dump(config | {"clusters": [cluster], "users": [user], "contexts": [context]}))
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_operator_that_waits_for_an_api_server(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        kubeconfig = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with run_operator(kubeconfig=kubeconfig) as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(number)
                output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "stopped before the start was over" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("seconds", [604_801, 10**15])
def test_a_lifetime_of_certificates_that_is_too_long_is_refused_in_words(tmp_path: Path, seconds: int) -> None:
    flags = ("--identity-secret=ca", "--identity-service=operator.ns.svc", f"--certificate-lifetime-seconds={seconds}")
    with run_operator(*flags, kubeconfig=tmp_path / "none") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--certificate-lifetime-seconds" in output
    assert "Traceback" not in output
