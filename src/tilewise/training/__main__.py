"""python -m tilewise.training: the trainer without the command line's extra packages."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from ..core.errors import TilewiseError
from .loop import train
from .progress import Lines
from .settings import Settings

TYPES = {"str": str, "int": int, "float": float, "int | None": int}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise.training", description=__doc__)
    parser.add_argument("--output", default="run", help="where checkpoint and metrics go")
    parser.add_argument("--lines-every", type=int, default=100, help="steps between two lines")
    for field in dataclasses.fields(Settings):
        needed = field.default is dataclasses.MISSING
        parser.add_argument("--" + field.name.replace("_", "-"), type=TYPES[str(field.type)],
                            required=needed, default=None if needed else field.default)
    options = vars(parser.parse_args(arguments))
    output, every = options.pop("output"), options.pop("lines_every")
    try:
        train(Settings(**options), output, Lines(every))
    except TilewiseError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
