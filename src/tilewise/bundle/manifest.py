"""The manifest of a bundle: what is in it, for which versions, machines and weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..core.isa import ISA
from ..kernels.cpu.emit.jit import LLVMLITE, ORIGIN
from ..planner.classes import VERSION as CLASSES
from .files import MANIFEST, MOST, PARAMETERS, PIECE, ROW, Folder, Refused, Stated

FORMAT = 1


def versions() -> dict[str, str]:
    """Of all that a bundle depends on; `sources` is a digest of the code that it comes from."""
    found = {"torch": torch.__version__, "llvmlite": LLVMLITE, "classes": CLASSES,
             "sources": _sources()}
    try:
        return {**found, "tilewise": version("tilewise")}
    except PackageNotFoundError:  # run from a source tree
        return found


@lru_cache(maxsize=1)
def _sources() -> str:
    """Of what writes kernels, prepares weights and plans: layouts in memory follow from it."""
    digest, package = hashlib.sha256(ORIGIN.encode()), Path(__file__).parents[1]
    for room in ("algorithms", "planner", "runtime", "conv", "model", "bundle"):
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """As read; file names are never taken from it, they follow from the rows."""

    versions: dict[str, str]
    files: dict[str, Stated]
    parameters: dict[str, Any]
    rows: dict[str, Any]

    def to_json(self) -> str:
        files = {name: {"bytes": file.bytes, "digests": list(file.digests)}
                 for name, file in sorted(self.files.items())}
        body = {"versions": self.versions, "piece": PIECE, "files": files,
                "state": state_digest(self.parameters), "parameters": self.parameters,
                "rows": self.rows}
        return json.dumps({"format": FORMAT, "sha256": sealed(body), "body": body},
                          indent=1) + "\n"

    def file(self, name: str) -> Stated:
        if name not in self.files:
            raise Refused(f"the manifest says nothing of {name}")
        return self.files[name]


def sealed(body: Any) -> str:
    """A digest of what a manifest says: damage is noticed, an attack needs a pinned digest."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def state_digest(parameters: dict[str, Any]) -> str:
    """One digest of all tensors: names, shapes, types and values."""
    lines = [f"{name} {data['dtype']} {data['shape']} {data['digest']}\n"
             for name, data in sorted(parameters.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def names(rows: list[str]) -> list[str]:
    """The files of a bundle with these rows."""
    return [PARAMETERS, *(pattern.format(row) for row in rows for pattern in ROW.values())]


def read(folder: Folder, digest: str | None) -> Manifest:
    """The manifest of a bundle; raises Refused for whatever no manifest can be."""
    text = folder.read(MANIFEST, MOST)
    found = hashlib.sha256(text).hexdigest()
    if digest is not None and found != digest.lower():
        raise Refused(f"{MANIFEST} has the SHA-256 {found}, needs {digest}")
    try:
        whole = json.loads(text)
        if whole["format"] != FORMAT:
            raise Refused(f"{MANIFEST} has format {whole['format']!r}, needs {FORMAT}")
        data = whole["body"]
        if whole["sha256"] != sealed(data) or data["piece"] != PIECE:
            raise Refused(f"{MANIFEST} is not as it was written: it was changed or damaged")
        files = {name: Stated(_size(file["bytes"]), tuple(map(str, file["digests"])))
                 for name, file in data["files"].items()}
        manifest = Manifest(dict(data["versions"]), files, dict(data["parameters"]),
                            dict(data["rows"]))
        for row in manifest.rows.values():
            if not isinstance(row["objects"], dict) or not isinstance(row["forms"], list):
                raise TypeError("a row without objects and forms")
        known = all(row in ISA for row in manifest.rows)
        right = data["state"] == state_digest(manifest.parameters)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise Refused(f"{MANIFEST} is not a manifest of format {FORMAT}: {problem!r}") from None
    if not known or not right or sorted(files) != sorted(names(list(manifest.rows))):
        raise Refused(f"{MANIFEST} contradicts itself")
    return manifest


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value
