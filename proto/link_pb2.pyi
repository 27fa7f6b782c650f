from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("sender", "epoch", "payload")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sender: str
    epoch: int
    payload: bytes
    def __init__(self, sender: _Optional[str] = ..., epoch: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
