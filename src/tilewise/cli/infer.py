"""tilewise infer: a model over all images of a folder or of Parquet files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import NO
from .output import Json, Shape, Threads, errors, print_json, progress

if TYPE_CHECKING:
    from torch import nn


def infer(
    source: Annotated[Path, typer.Argument(help="Name a folder of images or Parquet files.",
                                           exists=True)],
    model: Annotated[str, typer.Argument(help="Name a model or package.module:factory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write to this directory.")],
    bundle: Annotated[Path | None, typer.Option(
        help="Start from this bundle; the weights are the bundle's.")] = None,
    digest: Annotated[str | None, typer.Option(
        help="Refuse a bundle whose manifest has another SHA-256.")] = None,
    weights: Annotated[Path | None, typer.Option(
        help="Load this state_dict into the model.", exists=True, dir_okay=False)] = None,
    shape: Shape = None,
    batch: Annotated[int, typer.Option(help="Say how many images a call has.", min=1)] = 8,
    rows: Annotated[int, typer.Option(help="Say how many images a file has.", min=1)] = 1024,
    column: Annotated[str, typer.Option(help="Name the column of images.")] = "image",
    workers: Annotated[int, typer.Option(help="Say how many actors of Ray's.", min=1)] = 1,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run a model over images and write Parquet files. A run that was stopped goes on.

    Images that cannot be decoded are listed; then the exit code is 1.
    """
    from ..bench.subjects import SHAPES, USUAL, _shape
    from ..scale.images import Form
    from ..scale.jobs import infer as run

    channels, height, width = _shape(shape) or SHAPES.get(model, USUAL)
    form = Form(channels, height, width)
    state = None if weights is None else str(weights)
    with progress(f"inferring {source}") as tell:
        report = run(partial(_model, model, state), source, output, form=form,
                     column=column, batch=batch, rows=rows, bundle=bundle, digest=digest,
                     workers=workers, threads=threads, tell=tell)
    if json:
        print_json({**report._asdict(), "throughput": report.throughput})
    else:
        for name, why in report.failed:
            errors.print(f"{name}: {why}", markup=False, soft_wrap=True)
        print(f"{report.rows} images in {report.seconds:.1f} s, {report.throughput:.1f} a second; "
              f"{len(report.failed)} failed; {report.kept} were there already")
    if report.failed:
        raise typer.Exit(NO)


def _model(text: str, weights: str | None) -> nn.Module:
    """In each worker."""
    import torch

    from ..bench.subjects import subject

    torch.manual_seed(0)  # of a model without weights: all workers have the same
    model = subject(text, batch=1).model
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model
