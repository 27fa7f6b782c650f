from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("sender", "epoch", "payload", "more")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    sender: str
    epoch: int
    payload: bytes
    more: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sender: _Optional[str] = ..., epoch: _Optional[int] = ..., payload: _Optional[bytes] = ..., more: _Optional[_Iterable[bytes]] = ...) -> None: ...
