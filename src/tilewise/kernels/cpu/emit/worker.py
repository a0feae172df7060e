"""A process that compiles: requests come in as lines, objects go out with their lengths.

It is started without torch, whose import takes longer than most models take to compile.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

from .jit import compile_object
from .requests import Request


def serve(requests: BinaryIO, objects: BinaryIO) -> None:
    """Until the requests end; an object of length zero says that it could not be made."""
    for line in requests:
        try:
            image = compile_object(Request.from_json(line.decode()).module())
        except Exception:  # the process that asked finds out itself
            image = b""
        objects.write(len(image).to_bytes(8, "little") + image)
        objects.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
