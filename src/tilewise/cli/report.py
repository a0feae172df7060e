"""tilewise report: a page that can be kept and sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import Json, in_a_directory, print_json


def report(
    results: Annotated[list[Path], typer.Argument(
        help="Give result files that bench or ladder wrote with --output.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the page to this file.",
                                         callback=in_a_directory)] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(
        help="Write the figures to this directory, as PNG.")] = None,
    json: Json = False,
) -> None:
    """Make one HTML file, which needs no network, from result files."""
    from ..bench.report import check_renderer, html, write_pngs
    from ..bench.results import Result, understood

    found = {path.stem: Result.load(path).of("bench", "ladder", path=path) for path in results}
    if png is not None:
        check_renderer()  # before the old page is overwritten
    with understood(*results):
        page = html(list(found.values()))
    output.write_text(page, encoding="utf-8", errors="replace")
    pictures = write_pngs(found, png) if png is not None else []
    if json:
        print_json({"page": str(output), "bytes": output.stat().st_size,
                    "pictures": [str(path) for path in pictures]})
        return
    print(f"{output}: {output.stat().st_size / 1e3:.0f} kB")
    for path in pictures:
        print(path)
