"""tilewise bundle: what many workers need of a model, in one directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .model import SubjectName
from .output import Json, MaxError, Threads, print_json, progress, set_threads

if TYPE_CHECKING:
    from torch import Tensor


def bundle(
    subject: SubjectName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write to this directory.")],
    example: Annotated[list[str] | None, typer.Option(
        help="Give the shape of an input, such as 8x3x224x224; several are possible. The default "
             "is the subject's own example.")] = None,
    isa: Annotated[list[str] | None, typer.Option(
        help="Name an instruction set that this machine has, such as avx2; several are possible. "
             "The default is the machine's own.")] = None,
    weights: Annotated[Path | None, typer.Option(
        help="Load this state_dict into the model first.", exists=True, dir_okay=False)] = None,
    effort: Annotated[str, typer.Option(
        help="Choose estimate, or measure or exhaustive to tune the layers.")] = "estimate",
    max_error: MaxError = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write compiled code, plans and prepared weights of a model, for `tilewise.bundle.load`."""
    import torch

    import tilewise

    from ..bench.subjects import subject as read

    set_threads(threads)
    what = read(subject)
    if weights is not None:
        what.model.load_state_dict(torch.load(weights, weights_only=True))
    examples = [_example(text) for text in example or ()] or [what.example]
    with progress(f"bundling {subject}") as tell:
        saved = tilewise.bundle.save(what.model.eval(), examples, output, isas=isa or (),
                                     effort=effort, max_error=max_error, tell=tell)
    if json:
        print_json({**saved._asdict(), "path": str(saved.path)})
        return
    print(f"{saved.path}: {saved.bytes / 1e6:.1f} MB for {', '.join(saved.rows)}; "
          f"{saved.objects} kernels, {saved.forms} prepared weights")
    print(f"SHA-256 of its manifest: {saved.digest}")


def _example(text: str) -> Tensor:
    import torch

    from ..core.errors import TilewiseError

    if not re.fullmatch(r"\d+(x\d+)+", text):
        raise TilewiseError(f"example is {text!r}, needs sizes such as 8x3x224x224")
    return torch.randn(*map(int, text.split("x")))
