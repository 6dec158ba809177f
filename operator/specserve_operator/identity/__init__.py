"""Who is who between pods: the certificate authority, and the service that gives pods their certificates.

names         what certificates say: SPIFFE ids, host names; where a pod finds what it needs
authority     the authorities that sign and are trusted, as values; rotation is a function of (state, now)
keeper        keeps the state in a store and in step with time
certificates  X.509, from values
tokens        who a ServiceAccount token belongs to, by the keys in issuer_keys
pods          whether a pod may have a certificate
service       `IdentityService` over all of these
operator_tls  the operator's own certificate, for its server and for its calls to pods

Nothing here knows Kubernetes' client: `keeper.CaStore`, `issuer_keys.KeySource` and `service.FindPod` are given.
"""
