"""Condition types, condition reasons and event reasons: closed sets, and part of the API.

Scripts wait on conditions and alerts match reasons, so a value here is never renamed or given another
meaning; it may only be added. The schema keeps both as open strings (api/status.py), so that a newer operator
can report a new reason through an older CRD.

Every condition is present from the first pass, with status `Unknown` until its input is known. All of them
are computed by `core/status.py` and written by the reconciler; "from" below names where the input comes from.
A service without the part in question (no prefill, no training, no speculation, no objectives) reports `True`
with reason `NotConfigured`, so that `kubectl wait` on any condition ends.
"""

from enum import StrEnum


class ConditionType(StrEnum):
    """What a condition is about. All read so that `True` is the wished state, but for the last two."""

    # Every object of the service is applied, and the gateway and every serving pool have their wanted pods ready at
    # the observed generation: requests are served as the spec asks. Its reason is that of the first failing part.
    # From the cluster's answers, GatewayReady, PrefillReady and DecodeReady.
    READY = "Ready"
    # At least one gateway pod is ready and reaches a ready decode pod, and clients reach it through its Service. From
    # the gateway's pods and Service.
    GATEWAY_READY = "GatewayReady"
    # All wanted prefill pods are ready at the wanted revision. From the prefill pods.
    PREFILL_READY = "PrefillReady"
    # All wanted decode pods are ready at the wanted revision. From the decode pods.
    DECODE_READY = "DecodeReady"
    # Training pods are ready, or none is wanted at present. From the training pods.
    TRAINING_READY = "TrainingReady"
    # KV caches move between pools; False while decode pods prefill for themselves (TransferFailing). From the
    # decode pods' transfer counters.
    KV_TRANSFER_READY = "KVTransferReady"
    # Speculation is on and drafts are accepted often enough to be worth it; False with the reason while it is off.
    # The speed-up over the target alone is not measured. From the decode pods' speculation statistics.
    SPECULATION_EFFECTIVE = "SpeculationEffective"
    # Every latency objective is met over its window. From the latencies that decode pods observe.
    OBJECTIVES_MET = "ObjectivesMet"
    # The live draft is the best one known: no candidate waits for training or canary. From DraftRevisions.
    DRAFT_UP_TO_DATE = "DraftUpToDate"
    # A rollout is under way and moves; False when it is complete (RolloutComplete) or stuck (RolloutStalled).
    # From the revisions of the pods.
    PROGRESSING = "Progressing"
    # This operator would make other pods of the same spec than the ones that run: another default image, another pod
    # template. They are replaced when the user asks for it (annotation `specserve.dev/upgrade`), or changes the spec.
    # Also True while the installed CRDs are older than the operator (CRDOutdated). From the revision records.
    UPGRADE_AVAILABLE = "UpgradeAvailable"


class Reason(StrEnum):
    """Why a condition has its status, why a pool is not ready, or why speculation is off."""

    # Whole service and pools.
    ALL_POOLS_READY = "AllPoolsReady"
    PODS_READY = "PodsReady"
    PODS_NOT_READY = "PodsNotReady"
    SCALED_TO_ZERO = "ScaledToZero"
    NOT_CONFIGURED = "NotConfigured"  # the spec does not ask for this part
    PENDING = "Pending"  # not looked at yet: the first pass
    INVALID_SPEC = "InvalidSpec"  # the spec contradicts itself or the cluster; the message names the field
    APPLY_FAILED = "ApplyFailed"  # the cluster refused an object of the service; it is tried again
    PORT_UNAVAILABLE = "PortUnavailable"  # on one machine: the gateway's port cannot be listened on
    CRD_OUTDATED = "CRDOutdated"  # the installed CRD is older than the operator and drops fields
    # Pods.
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"  # unschedulable: no node with the GPUs, or quota used up
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOPING = "CrashLooping"
    OUT_OF_MEMORY = "OutOfMemory"
    MODEL_LOADING = "ModelLoading"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    TOKENIZER_MISMATCH = "TokenizerMismatch"  # target and draft have different vocabularies
    HOOKS_NOT_INSTALLED = "HooksNotInstalled"  # this engine build cannot be controlled: the worker refuses
    # Rollout.
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    ROLLOUT_COMPLETE = "RolloutComplete"
    ROLLOUT_STALLED = "RolloutStalled"  # no progress within rollout.progressDeadlineSeconds
    DRAINING = "Draining"  # old pods still finish their requests
    UP_TO_DATE = "UpToDate"
    NEWER_REVISION = "NewerRevision"  # what an upgrade would restart is in the message
    # Measurements.
    NO_TRAFFIC = "NoTraffic"
    METRICS_STALE = "MetricsStale"  # pods answer no statistics, so nothing is decided from them
    TOO_FEW_SAMPLES = "TooFewSamples"
    # KV transfer.
    TRANSFERRING = "Transferring"
    TRANSFER_FAILING = "TransferFailing"
    NO_PREFILL_PEERS = "NoPrefillPeers"
    # Speculation.
    DRAFTS_ACCEPTED = "DraftsAccepted"  # enough draft tokens are accepted; the speed-up itself is not measured
    MODE_ALWAYS = "ModeAlways"  # speculation.mode: Always
    MODE_NEVER = "ModeNever"  # speculation.mode: Never
    LOW_ACCEPTANCE = "LowAcceptance"
    HIGH_LOAD = "HighLoad"  # batches so full that verifying costs more than it brings
    # Latency and scaling.
    OBJECTIVES_MET = "ObjectivesMet"
    OBJECTIVE_MISSED = "ObjectiveMissed"
    OBJECTIVE_INFEASIBLE = "ObjectiveInfeasible"  # no number of replicas reaches it on this hardware
    MAX_REPLICAS_REACHED = "MaxReplicasReached"
    MIN_REPLICAS_REACHED = "MinReplicasReached"
    BUDGET_EXHAUSTED = "BudgetExhausted"  # spec.budget.maxGPUs
    LATENCY_HIGH = "LatencyHigh"
    LATENCY_LOW = "LatencyLow"
    STABILIZING = "Stabilizing"  # a recent change has not shown its effect yet
    EXTERNALLY_SCALED = "ExternallyScaled"  # the PoolScaler says so
    SPEC_CHANGED = "SpecChanged"
    # Drafts.
    DRAFT_LIVE = "DraftLive"
    DRAFT_CANDIDATE = "DraftCandidate"
    CANARY_RUNNING = "CanaryRunning"
    CANARY_PASSED = "CanaryPassed"
    CANARY_TIMED_OUT = "CanaryTimedOut"
    NO_GAIN = "NoGain"  # held-out acceptance gains less than promote.minAcceptanceGainPercent
    ACCEPTANCE_REGRESSED = "AcceptanceRegressed"
    LATENCY_REGRESSED = "LatencyRegressed"
    TRAINING_IN_PROGRESS = "TrainingInProgress"
    TRAINING_FAILED = "TrainingFailed"
    STORAGE_UNAVAILABLE = "StorageUnavailable"


class EventReason(StrEnum):
    """Reasons of events. One event per transition, with the numbers that decided it in the message."""

    POOL_SCALED = "PoolScaled"
    SCALING_HELD = "ScalingHeld"
    SPECULATION_ENABLED = "SpeculationEnabled"
    SPECULATION_DISABLED = "SpeculationDisabled"
    DRAFT_TRAINING_STARTED = "DraftTrainingStarted"
    DRAFT_CANARY_STARTED = "DraftCanaryStarted"
    DRAFT_PROMOTED = "DraftPromoted"
    DRAFT_ROLLED_BACK = "DraftRolledBack"
    DRAFT_REJECTED = "DraftRejected"
    KV_TRANSFER_FALLBACK = "KVTransferFallback"
    KV_TRANSFER_RESUMED = "KVTransferResumed"
    ROLLOUT_STARTED = "RolloutStarted"
    ROLLOUT_STALLED = "RolloutStalled"
    ROLLOUT_COMPLETE = "RolloutComplete"
    INVALID_SPEC = "InvalidSpec"
    APPLY_FAILED = "ApplyFailed"  # the cluster refused an object of the service; it is tried again
    # Pods, where no kubelet reports them (the local cluster) and on the service's own level.
    POD_STARTED = "PodStarted"
    POD_READY = "PodReady"
    POD_FAILED = "PodFailed"  # exited or was killed; restarted with back-off
    POD_STOPPED = "PodStopped"
    SERVICE_READY = "ServiceReady"
    SERVICE_NOT_READY = "ServiceNotReady"
