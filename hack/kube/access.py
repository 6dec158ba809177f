"""Talking to an API server as its administrator, or as anyone else."""

import http.client
import re
import ssl
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from hack.kube.audit import AuditEvent, read_audit_log
from hack.kube.certificates import Authority
from hack.kube.commands import built, environment, run
from hack.kube.components import ADMIN, API_SERVER_PORT, Layout, write_kubeconfig
from hack.kube.errors import KubectlError
from hack.kube.waiting import wait_until

REQUEST_TIMEOUT_SECONDS = 10.0
AUDIT_TIMEOUT_SECONDS = 10.0


class Access:
    """An API server as a client sees it. Paths and addresses are those of `layout`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self.layout.server

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig of the administrator (group system:masters)."""
        return self.layout.kubeconfig()

    @property
    def ca_file(self) -> Path:
        """The certificate of the authority that signed the API server's, PEM."""
        return self.layout.pki / "ca.crt"

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig for any user, by a new client certificate. What it may do is up to RBAC."""
        name = "user-" + re.sub(r"[^A-Za-z0-9.-]", "-", user)
        return write_kubeconfig(
            self.layout, Authority.load(self.layout.pki), user=user, groups=tuple(groups), name=name
        )

    def kubectl(self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """What kubectl prints, as the administrator or as `kubeconfig` says.

        Raises:
            KubectlError: if it fails, with its error output.
        """
        command = self.kubectl_command(*arguments, kubeconfig=kubeconfig)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=environment())
        if done.returncode:
            raise KubectlError(arguments, done.returncode, done.stderr)
        return done.stdout

    def kubectl_command(self, *arguments: str, kubeconfig: Path | None = None) -> list[str]:
        """The command line that `kubectl` runs, for a process that is to stay, such as a watch."""
        cache = self.layout.folder / "kubectl-cache"
        return [built("kubectl"), f"--kubeconfig={kubeconfig or self.kubeconfig}", f"--cache-dir={cache}", *arguments]

    def helm(self, *arguments: str) -> str:
        """What helm prints, as the administrator.

        Raises:
            CommandFailedError: if it fails, with its error output.
        """
        data = self.layout.folder / "helm"
        homes = {"HELM_CACHE_HOME": f"{data}/cache", "HELM_CONFIG_HOME": f"{data}/config", "HELM_DATA_HOME": f"{data}"}
        command = (built("helm"), f"--kubeconfig={self.kubeconfig}", *arguments)
        return run(*command, variables=environment(**homes))

    def get(self, path: str) -> tuple[int, bytes]:
        """The HTTP status and the body of a GET as the administrator; status 0 if there is no answer."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        context.load_cert_chain(self.layout.pki / f"{ADMIN}.crt", self.layout.pki / f"{ADMIN}.key")
        connection = http.client.HTTPSConnection(
            self.layout.address, API_SERVER_PORT, timeout=REQUEST_TIMEOUT_SECONDS, context=context
        )
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def has(self, path: str) -> bool:
        """Whether a GET as the administrator is answered with 200."""
        return self.get(path)[0] == http.HTTPStatus.OK

    def is_ready(self) -> bool:
        return self.has("/readyz")

    def audit_events(self) -> list[AuditEvent]:
        """Every request that was answered before this call, oldest first, those of the cluster's own parts included.

        A running API server writes a line just after the answer is sent. So this asks it for something of its own
        and reads until that is in the log; its own request is left out.
        """
        log = self.layout.audit_log
        mark = f"/version?audit-mark={uuid.uuid4()}"
        if self.has(mark):
            wait_until(
                lambda: mark in log.read_text(),
                AUDIT_TIMEOUT_SECONDS,
                what="the audit log has the latest request",
                hint=f"see {log}",
            )
        return [event for event in read_audit_log(log) if "audit-mark=" not in event.uri]
