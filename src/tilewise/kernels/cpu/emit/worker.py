"""A process that compiles: requests come in as lines, objects go out with their lengths.

It is started without torch, whose import takes longer than most models take to compile.
"""

from __future__ import annotations

from typing import BinaryIO

from .jit import ORIGIN, compile_object
from .requests import Request


def serve(requests: BinaryIO, objects: BinaryIO, origin: str) -> None:
    """Until an empty line; an object of length zero says that it could not be made.

    Nothing for a process of another `origin`: its sources were changed since it began.
    """
    if origin != ORIGIN:
        return
    for line in requests:
        if not line.strip():
            return
        try:
            image = compile_object(Request.from_line(line).module())
        except Exception:  # the process that asked finds out itself
            image = b""
        objects.write(len(image).to_bytes(8, "little") + image)
        objects.flush()
