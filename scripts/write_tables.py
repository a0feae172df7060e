"""The measured tables of README.md and docs, from the result files they name.

    python scripts/write_tables.py            # rewrite what stands between the marks
    python scripts/write_tables.py --check    # exit code 1 if a table is not what its file says

A table stands between `<!-- table NAME.json -->` and `<!-- end -->`, NAME.json being a file of
benchmarks/results.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"<!-- table (?P<name>[\w.-]+) -->\n(?P<old>.*?)<!-- end -->", re.DOTALL)


def table(result: dict[str, Any]) -> str:
    """A Markdown table and the line that says where it comes from."""
    subjects = {row.get("subject") for row in result["rows"]}
    kinds = {"ladder": _ladder, "errors": _errors}
    make = kinds.get(result["kind"]) or (_layers if len(subjects) > 1 else _model)
    return "\n".join(["", *make(result), "", _origin(result), "", ""])


def _origin(result: dict[str, Any]) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {text}" for name, text in m["versions"].items()
                         if name not in ("llvm", "numpy", "llvmlite", "tilewise"))
    limits = (f", {m['peak'] / 1e9:.0f} GFLOP/s and {m['bandwidth'] / 1e9:.0f} GB/s measured"
              if "peak" in m else "")
    return (f"{m['processor']}, {m['threads']} threads, {m['isa']}{limits}; {versions}; "
            f"{result['date']}.")


def _model(result: dict[str, Any]) -> list[str]:
    lines = [f"| {result['rows'][0]['subject']} | least ms | median ms | spread | "
             "of torch's best | by rounds | error |", "|---|--:|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        name = f"**{row['contender']}**" if row["family"] == "tilewise" else row["contender"]
        if row["minimum"] is None:
            lines.append(f"| {name} | | | | | | {row['note']} |")
            continue
        lines.append(f"| {name} | {row['minimum'] * 1e3:.0f} | {row['median'] * 1e3:.0f} | "
                     f"{row['spread']:.0%} | {row['ratio']:.2f} | {row['paired']:.2f} | "
                     f"{row['error']:.1e} |")
    return lines


def _layers(result: dict[str, Any]) -> list[str]:
    lines = ["| layer | torch's best ms | tilewise ms | of torch's best | by rounds | error |",
             "|---|--:|--:|--:|--:|--:|"]
    for subject in dict.fromkeys(row["subject"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["subject"] == subject]
        theirs = min(row["minimum"] for row in rows if row["family"] == "torch")
        ours = next(row for row in rows if row["family"] == "tilewise")
        lines.append(f"| `{subject}` | {theirs * 1e3:.1f} | {ours['minimum'] * 1e3:.1f} | "
                     f"{ours['ratio']:.2f} | {ours['paired']:.2f} | {ours['error']:.1e} |")
    return lines


def _errors(result: dict[str, Any]) -> list[str]:
    names = {0: "float32", 6: "six products", 3: "three", 1: "one"}
    lines = [f"| layer | algorithm | {' | '.join(names.values())} |", "|---|---|--:|--:|--:|--:|"]
    found = {(row["subject"], row["algorithm"], row["products"]): row for row in result["rows"]}
    for subject, algorithm in dict.fromkeys((key[0], key[1]) for key in found):
        rows = [found.get((subject, algorithm, products)) for products in names]
        cells = [f"{row['error']:.1e} of {row['declared']:.1e}" if row else "" for row in rows]
        lines.append(f"| `{subject}` | `{algorithm}` | {' | '.join(cells)} |")
    return [*lines, "", f"`{result['command']}`."]


def _ladder(result: dict[str, Any]) -> list[str]:
    lines = ["| rung | ms | GFLOP/s | of peak | moved MB | workspace MB | error | gain |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        cells = [row["name"], _format(row["minimum"], 1e3, ".3g"), _format(row["gflops"], 1, ".0f"),
                 _format(row["share"], 1, ".0%"), _format(row["bytes"], 1e-6, ".0f"),
                 _format(row["workspace"], 1e-6, ".1f"), _format(row["error"], 1, ".1e"),
                 _format(row["gain"], 1, ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *(f"- **{row['name']}**: {row['why']}." for row in result["rows"]
                          if row["kind"] == "rung")]


def _format(value: float | None, scale: float, how: str) -> str:
    return "" if value is None else format(value * scale, how)


def rewritten(text: str) -> str:
    """The text with every table as its file says."""
    def one(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / match["name"]).read_text())
        return f"<!-- table {match['name']} -->\n{table(result)}<!-- end -->"

    return MARK.sub(one, text)


def main(arguments: list[str]) -> int:
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    print("rewritten: " + (", ".join(stale) or "nothing"))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
