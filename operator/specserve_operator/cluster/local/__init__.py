"""A cluster on one machine: the rendered Kubernetes objects, run as processes.

`LocalCluster` implements `cluster.protocol.Cluster`, and beside it what an API server and kubectl give on Kubernetes:

    async with LocalCluster(Path(".specserve")) as cluster:          # raises StateDirInUse, ClusterError
        await cluster.put_service(manifest)          -> ApplyOutcome   # a validated SpeculativeService manifest
        await cluster.scale_pool("default", "tiny-decode", 3) -> ApplyOutcome  # the `replicas` of a PoolScaler
        await cluster.delete_service(key)            -> bool           # False: there was none
        await cluster.wait_gone(key, timeout_seconds=60) -> bool       # nothing of the service is left
        cluster.list_objects("Pod", namespace=None)  -> list[Manifest] # any kind, "Event" and "SpeculativeService" too
        cluster.get_object("Pod", "default", name)   -> Manifest | None
        cluster.endpoint_of("default", "tiny-gateway") -> str | None   # "http://127.0.0.1:8080"; None: no such listener
        cluster.read_log("default", pod, container=None, previous=False, tail_lines=None) -> str
        cluster.follow_log("default", pod, container=None, tail_lines=None) -> AsyncIterator[str]
    # leaving the block ends every pod gracefully, within `LocalOptions.shutdown_seconds`

`read_log` and `follow_log` raise `LogNotFound` (a `ClusterError`) that names the pods or containers there are.

Another process (the CLI) reads the same without the control plane, from files that are always whole:

    StateDir(Path(".specserve")).control_plane_pid()                  -> int | None   # None: none is running
    StateDir(path).list_objects(kind, namespace=None)                 -> list[Manifest]
    StateDir(path).read_log(...), StateDir(path).follow_log(...)      as above

Writes go through the running control plane.

What is the same as on Kubernetes: uid, resourceVersion, generation; background deletion by owner references;
Deployments and their status; pod phases, conditions and container statuses; probes, preStop, grace period, restarts
with back-off; ConfigMap volumes that change under a running pod; one address for each pod, so ports never collide;
names of headless Services (by files, see docs/contracts.md); ClusterIP Services (at 127.0.0.1); a ServiceAccount that
may read pods, if a Role says so. What is not: images (commands come from the environment specserve runs in), nodes,
ReplicaSets (pods belong to their Deployment), NetworkPolicies, and resource requests and limits, which are kept but
not enforced.

What a container gets besides its own environment: that of the control plane, `SPECSERVE_HOSTS_DIR`,
`SPECSERVE_RUN_DIR`, `SPECSERVE_POD_UID`, and `KUBECONFIG` if the pod has a ServiceAccount.
"""

from specserve_operator.cluster.local.cluster import LocalCluster
from specserve_operator.cluster.local.options import LocalOptions
from specserve_operator.cluster.local.statedir import LogNotFound, StateDir, StateDirInUse

__all__ = ["LocalCluster", "LocalOptions", "LogNotFound", "StateDir", "StateDirInUse"]
