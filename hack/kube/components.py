"""The files and command lines of the control plane's processes, the same in both kinds of cluster."""

from dataclasses import dataclass
from pathlib import Path

from hack.kube.audit import POLICY
from hack.kube.certificates import Authority, render_kubeconfig, service_account_keys, write_private
from hack.kube.commands import built

ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
API_SERVER_PORT = 6443
ADMIN = "admin"
ADMIN_GROUP = "system:masters"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc.cluster.local"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a control plane keeps its files and listens.

    The API server is at `address`, etcd at `etcd_address`. `service_network` is the first two bytes of the
    Services' addresses, such as `10.97`.
    """

    folder: Path
    address: str
    etcd_address: str
    service_network: str = "10.97"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{API_SERVER_PORT}"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def audit_log(self) -> Path:
        return self.folder / "log" / "audit.log"

    def log(self, component: str) -> Path:
        return self.folder / "log" / f"{component}.log"

    def kubeconfig(self, user: str = ADMIN) -> Path:
        return self.folder / f"{user}.conf"


def write_files(layout: Layout) -> Authority:
    """Writes what the control plane reads: keys, certificates, kubeconfigs, the audit policy. Keeps what is there."""
    for folder in (layout.folder, layout.pki, layout.folder / "log"):
        folder.mkdir(parents=True, exist_ok=True)
    layout.folder.chmod(0o700)
    if (layout.pki / "ca.crt").exists():
        return Authority.load(layout.pki)
    (layout.folder / "audit-policy.yaml").write_text(POLICY)
    private, public = service_account_keys()
    write_private(layout.pki / "service-accounts.key", private)
    (layout.pki / "service-accounts.pub").write_bytes(public)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    hosts = [layout.address, f"{layout.service_network}.0.1", *names]
    authority = Authority.create("specserve-kube")
    authority.issue("kube-apiserver", hosts=hosts).write(layout.pki, "apiserver")
    write_kubeconfig(layout, authority, user=ADMIN, groups=(ADMIN_GROUP,))
    for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        write_kubeconfig(layout, authority, user=f"system:{component}", name=component)
    # Last: its presence says that the rest is whole.
    authority.write(layout.pki)
    return authority


def write_kubeconfig(
    layout: Layout,
    authority: Authority,
    *,
    user: str,
    groups: tuple[str, ...] = (),
    name: str = "",
    hosts: tuple[str, ...] = (),
) -> Path:
    """Issues a client certificate and writes a kubeconfig with it, named after the user unless `name` says otherwise.

    The certificate also goes to the `pki` folder, for clients that want files and for servers (at `hosts`).
    """
    name = name or user
    credentials = authority.issue(user, groups, hosts=hosts)
    credentials.write(layout.pki, name)
    path = layout.kubeconfig(name)
    content = render_kubeconfig(layout.server, authority.certificate, user=user, credentials=credentials)
    write_private(path, content.encode())
    return path


def etcd_command(layout: Layout) -> list[str]:
    """etcd without encryption. It skips fsync: data outlive a killed process, not a machine that crashes."""
    client = f"http://{layout.etcd_address}:{ETCD_PORT}"
    peer = f"http://{layout.etcd_address}:{ETCD_PEER_PORT}"
    return [
        built("etcd"),
        f"--data-dir={layout.folder / 'etcd'}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def api_server_command(layout: Layout, *extra: str) -> list[str]:
    """kube-apiserver with RBAC, tokens for service accounts and an audit log, on top of `etcd_command`'s store."""
    pki = layout.pki
    return [
        built("kube-apiserver"),
        f"--etcd-servers=http://{layout.etcd_address}:{ETCD_PORT}",
        f"--bind-address={layout.address}",
        f"--secure-port={API_SERVER_PORT}",
        f"--service-cluster-ip-range={layout.service_network}.0.0/16",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--service-account-issuer={SERVICE_ACCOUNT_ISSUER}",
        f"--service-account-jwks-uri={layout.server}/openid/v1/jwks",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        f"--audit-policy-file={layout.folder / 'audit-policy.yaml'}",
        f"--audit-log-path={layout.audit_log}",
        # In one file: by default a new one begins after 100 MB.
        "--audit-log-maxsize=4096",
        *extra,
    ]


def controller_manager_command(layout: Layout, *extra: str) -> list[str]:
    """kube-controller-manager with its default controllers, one of its kind, so without leader election."""
    return [
        built("kube-controller-manager"),
        f"--kubeconfig={layout.kubeconfig('kube-controller-manager')}",
        "--leader-elect=false",
        "--use-service-account-credentials",
        # The default of 20 requests a second makes its start take seconds: a token for each controller.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        f"--service-account-private-key-file={layout.pki / 'service-accounts.key'}",
        *extra,
    ]
