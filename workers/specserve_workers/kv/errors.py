"""Why a KV transfer did not happen: a closed set of causes, and the errors that carry them.

Every cause is also the label under which a decode pod counts the local prefill it did instead, so the set is
closed and its values are part of what `GetStats` and the metrics say.
"""

from enum import StrEnum
from typing import ClassVar


class TransferCause(StrEnum):
    """Reasons a request that was meant to be prefilled remotely was not. Values are stable labels."""

    BAD_PARAMS = "bad_params"  # the parameters in the request are malformed or out of bounds
    UNSUPPORTED = "unsupported"  # the prompt is not plain token ids (embeddings, images, an adapter)
    PROMPT_MISMATCH = "prompt_mismatch"  # the prefill pod saw other token ids (chat template, tokenizer)
    NO_IDENTITY = "no_identity"  # this pod has no valid certificate
    CONNECT = "connect"  # nothing accepted the connection in time
    STALLED = "stalled"  # connected, but no byte came for the stall timeout
    UNKNOWN_LEASE = "unknown_lease"  # the producer does not hold this lease (any more)
    LAYOUT_MISMATCH = "layout_mismatch"  # blocks mean different things on the two sides
    CHECKSUM = "checksum"  # a chunk arrived damaged
    PROTOCOL = "protocol"  # a message out of order, of the wrong size or for a wrong place
    PRODUCER_BUSY = "producer_busy"  # the producer refuses more streams
    PRODUCER_ERROR = "producer_error"  # the producer failed or the connection broke
    CANCELLED = "cancelled"  # the request was aborted while its blocks were on the way
    INTERNAL = "internal"  # a fault of the consumer itself: a defect, logged with its traceback


class KvTransferError(Exception):
    """A transfer that did not happen. `cause` says why; the message names the peer or field."""

    cause: ClassVar[TransferCause] = TransferCause.INTERNAL


class BadParamsError(KvTransferError):
    """Transfer parameters of a request with a missing, mistyped or out-of-bounds field."""

    cause = TransferCause.BAD_PARAMS


class PromptMismatchError(KvTransferError):
    """The producer's prompt is not the consumer's."""

    cause = TransferCause.PROMPT_MISMATCH


class ConnectError(KvTransferError):
    """No connection within the connect timeout."""

    cause = TransferCause.CONNECT


class KvNoIdentityError(KvTransferError):
    """This pod has no certificate to show to the producer."""

    cause = TransferCause.NO_IDENTITY


class StalledError(KvTransferError):
    """No byte within the stall timeout."""

    cause = TransferCause.STALLED


class UnknownLeaseError(KvTransferError):
    """Unknown, expired or spent lease."""

    cause = TransferCause.UNKNOWN_LEASE


class LayoutMismatchError(KvTransferError):
    """The two sides' KV layouts differ; the message names the field."""

    cause = TransferCause.LAYOUT_MISMATCH


class ChecksumError(KvTransferError):
    """A chunk whose CRC-32 is not that of its bytes."""

    cause = TransferCause.CHECKSUM


class ProtocolError(KvTransferError):
    """A message that the protocol does not allow at this point."""

    cause = TransferCause.PROTOCOL


class ProducerBusyError(KvTransferError):
    """The producer serves as many streams as it allows."""

    cause = TransferCause.PRODUCER_BUSY


class ProducerError(KvTransferError):
    """The producer ended the transfer with an error, or the connection broke."""

    cause = TransferCause.PRODUCER_ERROR


class TransferCancelledError(KvTransferError):
    """The consumer gave the transfer up."""

    cause = TransferCause.CANCELLED
