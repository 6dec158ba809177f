"""Who this pod is to its peers: its key and certificate, and TLS made of them.

names      what certificates say: the operator has the same (docs/contracts.md)
material   key, certificate and trusted authorities as files in memory; every process of the pod reads them
keeper     gets certificates from the operator and renews them, in a thread of the pod's first process
channels   TLS of gRPC, both ends
contexts   TLS of HTTP, both ends

No restart is needed for a new certificate: each new connection is made with what the files say then.
"""
