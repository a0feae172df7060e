"""tilewise bench: layers and models against torch's best and other engines."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import NO
from .output import (
    Batch,
    Json,
    MaxError,
    Output,
    Rounds,
    Shape,
    Threads,
    command,
    milliseconds,
    print_json,
    print_table,
    progress,
    set_threads,
)

if TYPE_CHECKING:
    from ..bench.results import Result, Row
    from ..bench.subjects import Subject

app = typer.Typer(no_args_is_help=True,
                  help="Measure layers and models against torch's best and other engines.")

Against = Annotated[str, typer.Option(
    help="Compare with these engines, separated by commas: torch, openvino, openvino_default (in "
         "the precision that it takes by itself), onnxruntime, ncnn, mnn, tensorflow=PYTHON and "
         "jax=PYTHON, where PYTHON is the interpreter that has them.")]
Budget = Annotated[float, typer.Option(help="Start no new round of a subject after this many "
                                            "seconds.")]
Effort = Annotated[str, typer.Option(help="Choose how hard tilewise looks for plans: estimate, "
                                          "measure, exhaustive or wisdom_only.")]
Algorithm = Annotated[str | None, typer.Option(help="Run this one of tilewise.algorithms().")]
Cold = Annotated[bool, typer.Option("--cold", help="Empty the caches before every call.")]
Compile = Annotated[bool, typer.Option(help="Let torch.compile be one of torch's forms.")]


@app.callback(invoke_without_command=True)
def device_(
    context: typer.Context,
    device: Annotated[str, typer.Option(
        help="Choose cpu, or cuda to measure the layers of VGG16 on this machine's GPU against "
             "the vendor's library.")]
    = "cpu",
) -> None:
    """On a GPU: every algorithm, checked against the vendor's result and then timed."""
    if context.invoked_subcommand is not None or device == "cpu":
        return
    from ..bench.gpu import measure as measure_gpu

    with progress("measuring") as tell:
        rows = measure_gpu(tell=tell)
    print_table("GPU", ("problem", "algorithm", "difference", "median ms", "of the vendor's"),
                [(r.problem, r.algorithm, f"{r.difference:.1e}", milliseconds(r.median),
                  f"{r.ratio:.2f}x") for r in rows])


@app.command()
def layer(
    problems: Annotated[list[str], typer.Argument(
        help="Name problems such as n8c64h56w56k64r3s3p1_f32_forward+bias+relu.")],
    against: Against = "torch", batch: Batch = None, threads: Threads = None, rounds: Rounds = 15,
    budget: Budget = 30.0, effort: Effort = "estimate", max_error: MaxError = None,
    algorithm: Algorithm = None,
    cold: Cold = False, output: Output = None, json: Json = False,
) -> None:
    """Measure single convolutions."""
    from ..bench.subjects import subject

    _measure([lambda text=text: subject(text, batch) for text in problems], output, json,
             against=against, threads=threads, rounds=rounds, budget=budget, effort=effort,
             max_error=max_error, algorithm=algorithm, cold=cold)


@app.command()
def model(
    name: Annotated[str, typer.Argument(
        help="Name vgg16, resnet50, ... or package.module:factory.")],
    against: Against = "torch", batch: Batch = None, shape: Shape = None, threads: Threads = None,
    rounds: Rounds = 9, budget: Budget = 240.0, effort: Effort = "estimate",
    max_error: MaxError = None, cold: Cold = False, compile: Compile = True,
    output: Output = None, json: Json = False,
) -> None:
    """Measure a whole model, from an image to its result."""
    from ..bench.subjects import subject

    _measure([lambda: subject(name, batch, shape)], output, json, against=against,
             threads=threads, rounds=rounds, budget=budget, effort=effort, max_error=max_error,
             cold=cold, compile=compile)


@app.command()
def suite(
    name: Annotated[str, typer.Argument(
        help="Name vgg, vgg_first, vgg_pool, lenet, wide_filters, pointwise, depthwise or small.")],
    batch: Annotated[int, typer.Option(min=1, help="Put this many images into a batch.")] = 8,
    epilogue: Annotated[str, typer.Option(
        help="Add this to every convolution, such as +bias+relu+pool2.")] = "+bias+relu",
    against: Against = "torch", threads: Threads = None, rounds: Rounds = 15,
    budget: Budget = 30.0, effort: Effort = "estimate", max_error: MaxError = None,
    algorithm: Algorithm = None,
    cold: Cold = False, output: Output = None, json: Json = False,
) -> None:
    """Measure all layers of a network or a family of shapes, one after the other."""
    from ..bench.subjects import layer as one_layer
    from ..bench.suites import suite as problems

    _measure([lambda p=p: one_layer(p) for p in problems(name, batch, epilogue)], output, json,
             against=against, threads=threads, rounds=rounds, budget=budget, effort=effort,
             max_error=max_error, algorithm=algorithm, cold=cold)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="Give the earlier result file.")],
    new: Annotated[Path, typer.Argument(help="Give the later result file.")],
    threshold: Annotated[float, typer.Option(
        help="Accept the loss of this share of the speed relative to torch.")] = 0.15,
    json: Json = False,
) -> None:
    """Compare two result files. The exit code is 1 if a subject became slower relative to torch."""
    from dataclasses import asdict

    from ..bench.results import Result, understood
    from ..bench.results import compare as changes

    both = [Result.load(path).of("bench", path=path) for path in (old, new)]
    with understood(old, new):
        found = changes(both[0], both[1], threshold)
    if json:
        print_json([asdict(change) for change in found])
    else:
        print_table(f"{new} against {old}: above 1 is faster",
                    ("subject", "time", "relative to torch", ""),
                    [(c.subject, f"{c.time:.2f}x", f"{c.against_torch:.2f}x",
                      "regression" if c.regression else "") for c in found],
                    styles=["red" if c.regression else None for c in found])
    if any(change.regression for change in found):
        raise typer.Exit(NO)


def _measure(subjects: list[Any], output: Path | None, json: bool, *, against: str,
             threads: int | None, **settings: Any) -> None:
    import torch

    from ..bench.machine import best_limits, facts
    from ..bench.run import Options, measure

    torch.manual_seed(0)
    names = tuple(name for name in against.split(",") if name)
    options = Options(against=names, threads=set_threads(threads), **settings)
    keep = output is not None or json
    rows: list[Row] = []
    plans: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for make in subjects:
        with progress("starting") as tell:
            machine = machine or (facts(options.threads, tell=tell) if keep else {})
            what = make()
            found = measure(what, options, tell)
            rows += found
            if keep:
                plans += _plans(what, options.max_error)
        if not json:
            _print(what, found)
    if keep:
        result = _result(rows, plans, options, best_limits(machine))
        if output is not None:
            result.save(output)
        if json:
            from dataclasses import asdict

            print_json(asdict(result))


def _print(what: Subject, rows: list[Row]) -> None:
    def row(r: Row) -> tuple[str, ...]:
        error = "-" if r.error is None else f"{r.error:.1e}"
        if r.minimum is None or r.median is None or r.spread is None:
            return (r.contender, "-", "-", "-", "-", "-", "-", error, r.note)
        return (r.contender, milliseconds(r.minimum), milliseconds(r.median), f"{r.spread:.0%}",
                f"{r.images / r.minimum:.1f}", f"{r.ratio:.2f}x", f"{r.paired:.2f}x", error, r.note)

    columns = ("", "least ms", "median ms", "spread", "images/s", "of torch's best", "by rounds",
               "error", "")
    print_table(what.name, columns, [row(r) for r in rows],
                styles=["bold" if r.family == "tilewise" else None for r in rows],
                spare=("images/s", "spread", "by rounds", "median ms"))


def _plans(what: Subject, max_error: float | None) -> list[dict[str, Any]]:
    """What ran, layer by layer."""
    import tilewise

    from ..model.tuning import observe

    fast = tilewise.optimize(what.model, max_error=max_error)
    return [{"subject": what.name, "layer": x.name,
             "problem": str(x.plan.problem), "algorithm": x.plan.algorithm,
             "schedule": str(x.plan.schedule), "seconds": x.plan.seconds, "source": x.plan.source,
             "error": x.plan.error} for x in observe(fast, what.example)]


def _result(rows: list[Row], plans: list[dict[str, Any]], options: Any,
            machine: dict[str, Any]) -> Result:
    from dataclasses import asdict

    from ..bench.results import Result

    return Result("bench", command(), date.today().isoformat(), machine,
                  {**asdict(options), "against": list(options.against)},
                  [asdict(row) for row in rows], plans)
