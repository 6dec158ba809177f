"""What `describe` prints, as golden text."""

from datetime import UTC, datetime

from specserve_operator.cli.describe import describe_service

NOW = datetime(2026, 1, 1, 12, 3, 20, tzinfo=UTC)

SERVICE = {
    "apiVersion": "specserve.dev/v1alpha1",
    "kind": "SpeculativeService",
    "metadata": {
        "name": "tiny",
        "namespace": "default",
        "generation": 2,
        "creationTimestamp": "2026-01-01T12:00:00Z",
        "labels": {"team": "a", "env": "dev"},
    },
    "spec": {
        "model": {"uri": "file:///models/target"},
        "engine": {"args": ["--block-size", "32"]},
        "speculation": {
            "draft": {"method": "DraftModel", "uri": "file:///models/draft"},
            "length": {"max": 4},
        },
    },
    "status": {
        "observedGeneration": 2,
        "endpoint": "http://127.0.0.1:8080",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "AllPoolsReady",
                "message": "all pods are ready",
                "lastTransitionTime": "2026-01-01T12:03:00Z",
            }
        ],
        "pools": [
            {"name": "prefill", "desired": 1, "replicas": 1, "ready": 1, "updated": 1, "revision": "0a1b"},
            {
                "name": "decode",
                "desired": 2,
                "replicas": 2,
                "ready": 1,
                "updated": 2,
                "reason": "PodsNotReady",
                "message": "1 of 2 pods is ready",
            },
        ],
        "latency": {
            "timeToFirstToken": [
                {
                    "percentile": 90,
                    "observedMilliseconds": 38,
                    "objectiveMilliseconds": 500,
                    "samples": 120,
                    "windowSeconds": 300,
                }
            ],
            "timePerOutputToken": [{"percentile": 90, "samples": 0, "windowSeconds": 300}],
        },
        "speculation": {
            "state": "Enabled",
            "reason": "SpeedingUp",
            "policy": "DSDE",
            "acceptancePercent": 62,
            "meanAcceptedLength": "2.7",
            "speedup": {"ratio": "1.40", "low": "1.30", "high": "1.50", "windows": 20},
        },
        "kvTransfer": {"transfers": 12, "fallbacks": 1, "bytes": 1_572_864, "tokens": 3000},
        "scalingHistory": [
            {
                "time": "2026-01-01T12:02:20Z",
                "pool": "decode",
                "fromReplicas": 1,
                "toReplicas": 2,
                "reason": "SpecChanged",
                "message": "spec.decode.replicas is 2",
            }
        ],
    },
}
EVENTS = [
    {
        "type": "Warning",
        "reason": "PodFailed",
        "message": "exit code 1",
        "count": 3,
        "firstTimestamp": "2026-01-01T12:00:20Z",
        "lastTimestamp": "2026-01-01T12:03:10Z",
    }
]

EXPECTED = """\
Name:         tiny
Namespace:    default
Labels:       env=dev
              team=a
Annotations:  <none>
API Version:  specserve.dev/v1alpha1
Kind:         SpeculativeService
Generation:   2 (observed 2)
Age:          3m20s
Endpoint:     http://127.0.0.1:8080
Model:
  Name:         tiny
  URI:          file:///models/target
  Engine Args:  --block-size 32
Speculation:
  Mode:    Auto
  Draft:   DraftModel file:///models/draft
  Length:  DSDE, 0 to 4 tokens, cap Mean
Conditions:
  Type    Status   Reason          Age   Message
  ----    ------   ------          ---   -------
  Ready   True     AllPoolsReady   20s   all pods are ready
Pools:
  Name      Desired   Current   Ready   Updated   Revision   Reason         Message
  ----      -------   -------   -----   -------   --------   ------         -------
  prefill   1         1         1       1         0a1b
  decode    2         2         1       2         <none>     PodsNotReady   1 of 2 pods is ready
Latency:
  Metric   Percentile   Observed   Objective   Samples   Window
  ------   ----------   --------   ---------   -------   ------
  TTFT     p90          38ms       500ms       120       5m
  TPOT     p90          <none>     <none>      0         5m
Speculation Status:
  State:                 Enabled (SpeedingUp)
  Policy:                DSDE
  Acceptance:            62%
  Mean Accepted Length:  2.7
  Speed-up:              1.40x (95% 1.30 to 1.50)
KV Transfer:
  Transfers:  12
  Fallbacks:  1
  Tokens:     3000
  Bytes:      1.5 MiB
Scaling History:
  Age   Pool     Replicas   Reason        Message
  ---   ----     --------   ------        -------
  60s   decode   1 -> 2     SpecChanged   spec.decode.replicas is 2
Events:
  Type      Reason      Age                Message
  ----      ------      ---                -------
  Warning   PodFailed   10s (x3 over 3m)   exit code 1
"""


def test_describe_shows_everything_that_is_known() -> None:
    assert describe_service(SERVICE, pods=[], events=EVENTS, now=NOW) == EXPECTED


def test_describe_of_a_service_without_status_shows_no_empty_sections() -> None:
    fresh = {"metadata": {"name": "fresh"}, "spec": {"model": {"uri": "hf://a/b"}}}
    lines = describe_service(fresh, pods=[], events=[], now=NOW).splitlines()
    assert [line for line in lines if not line.startswith(" ") and line.endswith(":")] == [
        "API Version:",
        "Kind:",
        "Model:",
    ]
    assert lines[-1] == "Events:  <none>"


def test_describe_shows_a_static_length_by_its_tokens() -> None:
    service = {
        "metadata": {"name": "s"},
        "spec": {"speculation": {"draft": {"method": "NGram"}, "length": {"policy": "Static", "tokens": 3}}},
    }
    text = describe_service(service, pods=[], events=[], now=NOW)
    assert "Length:  Static, 3 tokens" in text
    assert "Draft:   NGram\n" in text


def test_describe_lists_the_pods() -> None:
    pod = {
        "metadata": {"name": "tiny-decode-1", "creationTimestamp": "2026-01-01T12:03:00Z"},
        "spec": {"containers": [{"name": "engine"}]},
        "status": {"phase": "Running"},
    }
    lines = describe_service(SERVICE, pods=[pod], events=[], now=NOW).splitlines()
    start = lines.index("Pods:")
    assert lines[start + 2].split() == ["tiny-decode-1", "0/1", "Running", "0", "20s"]
