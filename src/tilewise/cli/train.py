"""tilewise train: a small trainer, to see the engine learn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .output import Json, Threads, bars, console, errors, print_json, set_threads


def train(
    data: Annotated[Path, typer.Argument(
        help="A directory of idx files, or with a folder of images for each class.")],
    output: Annotated[Path, typer.Option(
        "--output", "-o", help="Where the run lives; one that is there goes on.")],
    model: Annotated[str, typer.Option(help="lenet_a, lenet_b, vgg11, ...")] = "lenet_a",
    engine: Annotated[str, typer.Option(
        help="tilewise, torch, torch-channels-last or torch-compile.")] = "tilewise",
    epochs: Annotated[int, typer.Option(help="How often every image is seen.")] = 3,
    batch: Annotated[int, typer.Option(help="Images a step, of all processes together.")] = 64,
    rate: Annotated[float, typer.Option(help="Of learning, constant.")] = 0.01,
    momentum: Annotated[float, typer.Option(help="Of SGD.")] = 0.9,
    decay: Annotated[float, typer.Option(help="Of weights.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of first weights, batches and dropout.")] = 0,
    size: Annotated[int | None, typer.Option(
        help="Sides of the images; the model's own, if not said, else 224.")] = None,
    limit: Annotated[int | None, typer.Option(
        min=1, help="How many images to train with; all, if not said.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 200,
    lines_every: Annotated[int, typer.Option(
        min=1, help="Steps between two lines, where there is no terminal for a bar.")] = 100,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Train a network, or go on from the checkpoint of a run; under torchrun in several processes.

    The same command gives the same weights, interrupted or not.
    """
    from ..training import Lines, Settings, train

    set_threads(threads)
    settings = Settings(str(data), model, engine, epochs, batch, rate, momentum, decay, seed, size,
                        limit, save_every)
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
