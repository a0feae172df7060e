"""Where images come from: folders and Parquet files, cut into parts that are always the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import NotInstalled, TilewiseError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class Part(NamedTuple):
    """Some rows of the source: the unit of work, of output files and of a restart."""

    number: int
    file: str  # a Parquet file, or empty
    start: int  # its first row
    names: tuple[str, ...]  # files of a folder
    size: int


def arrow() -> Any:
    """pyarrow's Parquet, where it is installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise NotInstalled("results are Parquet files, which need pyarrow: "
                           "pip install 'tilewise[scale]'") from error
    return parquet


def parts(source: Path, rows: int) -> list[Part]:
    """The whole source, in the order of its names."""
    files = [source] if source.is_file() else sorted(source.rglob("*"))
    tables = [file for file in files if file.suffix.lower() == ".parquet"]
    images = [file for file in files if file.suffix.lower() in ENDINGS]
    if bool(tables) == bool(images):
        raise TilewiseError(f"{source} has {len(tables)} Parquet files and {len(images)} images, "
                            "needs one kind of them")
    root = source.parent if source.is_file() else source
    found = _of_tables(tables, rows) if tables else _of_images(images, root, rows)
    return [part._replace(number=i) for i, part in enumerate(found)]


def _of_images(images: list[Path], root: Path, rows: int) -> Iterator[Part]:
    names = [str(image.relative_to(root)) for image in images]
    for start in range(0, len(names), rows):
        some = tuple(names[start:start + rows])
        yield Part(0, "", start, some, len(some))


def _of_tables(tables: list[Path], rows: int) -> Iterator[Part]:
    for table in tables:
        count = arrow().ParquetFile(table).metadata.num_rows
        for start in range(0, count, rows):
            yield Part(0, str(table), start, (), min(rows, count - start))


def items(source: Path, part: Part, column: str) -> list[tuple[str, Any]]:
    """Name and content, bytes or a path, of every image of a part."""
    root = source.parent if source.is_file() else source
    if not part.file:
        return [(name, root / name) for name in part.names]
    values = _rows(part, column)
    return [(f"{Path(part.file).name}:{part.start + i}", value) for i, value in enumerate(values)]


def _rows(part: Part, column: str) -> list[Any]:
    """Of the groups that have these rows; a value may be bytes, or a struct with bytes."""
    file = arrow().ParquetFile(part.file)
    if column not in file.schema_arrow.names:
        raise TilewiseError(f"{part.file} has the columns {', '.join(file.schema_arrow.names)}, "
                            f"needs {column!r}: --column says which has the images")
    first, groups, skipped = 0, [], 0
    for i in range(file.num_row_groups):
        size = file.metadata.row_group(i).num_rows
        if first + size <= part.start:
            skipped += size
        elif first < part.start + part.size:
            groups.append(i)
        first += size
    values = file.read_row_groups(groups, columns=[column]).column(column).to_pylist()
    start = part.start - skipped
    return [value.get("bytes") if isinstance(value, dict) else value
            for value in values[start:start + part.size]]
