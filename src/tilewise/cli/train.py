"""tilewise train: a small trainer, to see the engine learn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Json, Threads, bars, console, errors, print_json, set_threads


def train(
    data: Annotated[Path, typer.Argument(
        help="Give a directory of idx files, or one with a folder of images for each class.")],
    output: Annotated[Path, typer.Option(
        "--output", "-o", help="Keep the run in this directory. A run that is there goes on.")],
    model: Annotated[str, typer.Option(
        help="Train this model: lenet_a, lenet_b, vgg11 or another of tilewise.models.")]
    = "lenet_a",
    engine: Annotated[str, typer.Option(
        help="Compute with tilewise, torch, torch-channels-last or torch-compile.")] = "tilewise",
    epochs: Annotated[int, typer.Option(help="Show every image this many times.")] = 3,
    batch: Annotated[int, typer.Option(
        help="Take this many images a step, in all processes together.")] = 64,
    rate: Annotated[float, typer.Option(
        help="Use this learning rate for SGD.")] = 0.01,
    momentum: Annotated[float, typer.Option(help="Use this momentum for SGD.")] = 0.9,
    decay: Annotated[float, typer.Option(help="Use this decay of weights.")] = 0.0,
    seed: Annotated[int, typer.Option(
        help="Draw first weights, batches and dropout from this seed.")] = 0,
    size: Annotated[int | None, typer.Option(
        help="Scale images to this many pixels a side. The default is the model's own size, or "
             "224.")] = None,
    limit: Annotated[int | None, typer.Option(
        min=1, help="Train with this many images. The default is all of them.")] = None,
    save_every: Annotated[int, typer.Option(
        help="Write a checkpoint after this many steps.")] = 200,
    schedule: Annotated[str, typer.Option(
        help="Keep the rate constant, or let it fall to zero along half a cosine.")] = "constant",
    average: Annotated[float, typer.Option(
        help="Also average the weights, and keep this much of the average in each step, such as "
             "0.999. 0 averages nothing.")] = 0.0,
    precision: Annotated[str, typer.Option(
        help="Compute with torch's setting highest, high or medium for float32 products.")]
    = "highest",
    lines_every: Annotated[int, typer.Option(
        min=1, help="Print a line after this many steps, where there is no terminal for a bar.")]
    = 100,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Train a network, or go on from the checkpoint of a run.

    Under torchrun it trains in several processes. The same command gives the same weights,
    interrupted or not.
    """
    from ..training import Lines, Settings, train

    set_threads(threads)
    settings = Settings(str(data), model, engine, epochs, batch, rate, momentum, decay, seed, size,
                        limit, save_every, schedule, average, precision)
    if errors.is_terminal:
        with Bar(lines=not json) as bar:
            history = train(settings, output, bar)
    else:
        history = train(settings, output, None if json else Lines(lines_every))
    if json:
        print_json(history)


class Bar:
    """Steps as a bar on stderr, epochs as lines on stdout."""

    def __init__(self, lines: bool = True) -> None:
        self._bar, self._lines = bars(), lines
        self._steps = self._bar.add_task("steps", visible=False)
        self._other = self._bar.add_task("", visible=False)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def doing(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._other, description=what, completed=done, total=total,
                         visible=done < total)

    def start(self, step: int, steps: int, note: str) -> None:
        self._say(note)
        self._bar.update(self._steps, completed=step, total=steps, visible=True)

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        self._bar.update(self._steps, advance=1, description=f"epoch {epoch}, loss {loss:.4f}")

    def epoch(self, epoch: int, summary: dict[str, Any]) -> None:
        from ..training.progress import summary_line

        self._say(summary_line(epoch, summary))

    def _say(self, line: str) -> None:
        if self._lines:
            console.print(line)
