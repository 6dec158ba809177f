"""Real Kubernetes for tests on one Linux machine, without a container engine.

`control_plane.ControlPlane` is an API server with its store, in seconds and without root; `cluster.Cluster` a
whole cluster with nodes that run pods. `python -m hack.kube` is the command line; README.md says how it is made.
"""
