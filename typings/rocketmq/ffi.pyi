# The part of rocketmq.ffi that we use; the package ships no types.
from enum import IntEnum

class MessageModel(IntEnum):
    BROADCASTING = 0
    CLUSTERING = 1

class _Library:
    def Subscribe(self, consumer: int, topic: bytes, expression: bytes) -> int: ...  # noqa: N802 - the library's name

dll: _Library
