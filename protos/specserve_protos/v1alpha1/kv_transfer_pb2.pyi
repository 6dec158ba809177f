from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvLayout(_message.Message):
    __slots__ = ("protocol_version", "revision", "dtype", "block_size_tokens", "instruction_set", "tensor_parallel_size", "layers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_SET_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    revision: str
    dtype: str
    block_size_tokens: int
    instruction_set: str
    tensor_parallel_size: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    def __init__(self, protocol_version: _Optional[int] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., instruction_set: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("name", "block_bytes", "block_shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    block_bytes: int
    block_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., block_bytes: _Optional[int] = ..., block_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease", "layout", "first_block", "num_blocks")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    layout: KvLayout
    first_block: int
    num_blocks: int
    def __init__(self, lease: _Optional[bytes] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: FetchHeader
    chunk: LayerChunk
    def __init__(self, header: _Optional[_Union[FetchHeader, _Mapping]] = ..., chunk: _Optional[_Union[LayerChunk, _Mapping]] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("num_blocks", "prompt_tokens", "prompt_sha256", "total_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    prompt_tokens: int
    prompt_sha256: bytes
    total_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_sha256: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class LayerChunk(_message.Message):
    __slots__ = ("layer_index", "block_offset", "data", "crc32")
    LAYER_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    layer_index: int
    block_offset: int
    data: bytes
    crc32: int
    def __init__(self, layer_index: _Optional[int] = ..., block_offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease", "pulls")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    pulls: int
    def __init__(self, lease: _Optional[bytes] = ..., pulls: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...
