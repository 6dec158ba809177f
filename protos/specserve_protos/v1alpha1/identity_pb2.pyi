from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class CertifyRequest(_message.Message):
    __slots__ = ("token", "signing_request")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    token: str
    signing_request: bytes
    def __init__(self, token: _Optional[str] = ..., signing_request: _Optional[bytes] = ...) -> None: ...

class CertifyResponse(_message.Message):
    __slots__ = ("certificate_pem", "trust_bundle_pem")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    TRUST_BUNDLE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: str
    trust_bundle_pem: str
    def __init__(self, certificate_pem: _Optional[str] = ..., trust_bundle_pem: _Optional[str] = ...) -> None: ...
