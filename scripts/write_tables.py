"""The measured tables of README.md and docs, from the result files they name.

    python scripts/write_tables.py            # rewrite what stands between the marks
    python scripts/write_tables.py --check    # exit code 1 if a table is not what its file says

A table stands between `<!-- table NAME.json -->` and `<!-- end -->`, NAME.json being a file of
benchmarks/results; a word after the name chooses a part of it. Below it are the machine, the date
and the command.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"<!-- table (?P<name>[\w.-]+\.json)(?: (?P<part>\w+))? -->\n"
                  r"(?P<old>.*?)<!-- end -->", re.DOTALL)
WIDTH, HEIGHT = 108, 48  # of what is shown of a command's answer


def table(result: dict[str, Any], part: str | None = None) -> str:
    """Markdown: what was measured, where, and the command."""
    if result["kind"] == "transcript":
        return _answer(next(row for row in result["rows"] if row["name"] == part))
    if part == "headline":
        return _headline(result)
    lines = _zoo_engines(result) if part == "engines" else KINDS[result["kind"]](result)
    return "\n".join(["", *lines, "", _origin(result), "", "```", result["command"], "```", "", ""])


def _origin(result: dict[str, Any]) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {text}" for name, text in m["versions"].items()
                         if name not in ("llvm", "numpy", "llvmlite", "tilewise"))
    if "processor" not in m:
        return f"With {versions}; {result['date']}."
    limits = (f", {m['peak'] / 1e9:.0f} GFLOP/s and {m['bandwidth'] / 1e9:.0f} GB/s measured"
              if "peak" in m else "")
    return (f"{m['processor']}, {m['threads']} threads, {m['isa']}{limits}; {versions}; "
            f"{result['date']}.")


def _headline(result: dict[str, Any]) -> str:
    """The one number of a model's result."""
    ours = next(row for row in result["rows"] if row["family"] == "tilewise")
    return (f"\n**{ours['ratio']:.1f} times the speed of PyTorch's best form**: {ours['subject']}, "
            f"float32, {result['machine']['threads']} threads of one Xeon.\n\n")


def _answer(row: dict[str, Any]) -> str:
    """What a command says, long lines and long answers cut."""
    said = [line.rstrip() for line in row["output"].splitlines()]
    shown = [line if len(line) <= WIDTH else line[:WIDTH - 2].rstrip() + " …" for line in said]
    shown = shown if len(shown) <= HEIGHT + 1 else [*shown[:HEIGHT], "…"]
    return "\n".join(["", "```", f"$ {row['command']}", *shown, "```", "",
                      f"That took {row['wall']:.0f} s.", "", ""])


def _bench(result: dict[str, Any]) -> list[str]:
    subjects = {row["subject"] for row in result["rows"]}
    return _layers(result) if len(subjects) > 1 else _model(result)


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
    return lines


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


def _algorithms(result: dict[str, Any]) -> list[str]:
    subjects = list(dict.fromkeys(row["subject"] for row in result["rows"]))
    found = {(row["name"], row["subject"]): row for row in result["rows"]}
    grows = {row["name"]: row["grows"] for row in result["rows"]}
    names = " | ".join(f"`{subject}`" for subject in subjects)
    lines = [f"| algorithm | error grows with | {names} |", "|---|---|" + "--:|" * len(subjects)]
    for name, why in grows.items():
        cells = (f"{row['error']:.1e} of {row['declared']:.1e}"
                 for row in (found[name, subject] for subject in subjects))
        lines.append(f"| {name} | {why} | {' | '.join(cells)} |")
    return lines


def _training(result: dict[str, Any]) -> list[str]:
    lines = ["| engine | test accuracy after each epoch | seconds of each epoch's steps | in all | "
             "with start, tests, checkpoints |", "|---|---|---|--:|--:|"]
    for row in result["rows"]:
        accuracies = " ".join(f"{epoch['accuracy']:.4f}" for epoch in row["epochs"])
        seconds = [epoch["seconds"] for epoch in row["epochs"]]
        lines.append(f"| {row['engine']} | {accuracies} | "
                     f"{' '.join(f'{value:.1f}' for value in seconds)} | {sum(seconds):.1f} | "
                     f"{sum(row['walls']):.1f} |")
    return [*lines, "", _training_ratios(result)]


def _training_ratios(result: dict[str, Any]) -> str:
    """Ours beside the best of torch's that went as far."""
    ours = next(row for row in result["rows"] if row["engine"] == "tilewise")
    others = [row for row in result["rows"] if row["engine"] != "tilewise"
              and len(row["epochs"]) == len(ours["epochs"])]

    def seconds(row: dict[str, Any]) -> list[float]:
        return [epoch["seconds"] for epoch in row["epochs"]]

    best = min(others, key=lambda row: sum(seconds(row)))
    by_epoch = ", ".join(f"{a / b:.2f}" for a, b in zip(seconds(best), seconds(ours)))
    last = [row["epochs"][-1]["accuracy"] for row in (best, ours)]
    return (f"Beside {best['engine']}, tilewise takes "
            f"{sum(seconds(best)) / sum(seconds(ours)):.2f} times less for the steps, which "
            f"include reading and scaling the images ({by_epoch} by epoch), and "
            f"{sum(best['walls']) / sum(ours['walls']):.2f} times less in all. Accuracies end "
            f"{100 * abs(last[0] - last[1]):.2f} points apart.")


def _training_seeds(result: dict[str, Any]) -> list[str]:
    lines = ["| engine | seed | test accuracy after each epoch | seconds of each epoch's steps |",
             "|---|--:|---|---|"]
    for row in result["rows"]:
        accuracies = " ".join(f"{epoch['accuracy']:.4f}" for epoch in row["epochs"])
        seconds = " ".join(f"{epoch['seconds']:.1f}" for epoch in row["epochs"])
        lines.append(f"| {row['engine']} | {row['seed']} | {accuracies} | {seconds} |")
    return [*lines, "", _seeds_compared(result)]


def _seeds_compared(result: dict[str, Any]) -> str:
    """Accuracies by their spread, epochs by the ratios of those that took turns."""
    runs = {(row["engine"], row["seed"]): row["epochs"] for row in result["rows"]}
    engines = list(dict.fromkeys(row["engine"] for row in result["rows"]))
    last = {engine: [epochs[-1]["accuracy"] for (one, _), epochs in runs.items() if one == engine]
            for engine in engines}
    ended = "; ".join(f"{engine} between {min(found):.4f} and {max(found):.4f}, mean "
                      f"{statistics.mean(found):.4f}" for engine, found in last.items())
    told = []
    for engine in (one for one in engines if one != "tilewise"):
        ratios = [a["seconds"] / b["seconds"] for (one, seed), epochs in runs.items()
                  if one == engine for a, b in zip(epochs, runs["tilewise", seed])]
        told.append(f"An epoch of {engine} takes {statistics.median(ratios):.2f} times as long as "
                    f"one of tilewise in the median, {min(ratios):.2f} to {max(ratios):.2f} times.")
    places: dict[str, list[str]] = {}
    for row in result["rows"]:
        places.setdefault(row.get("on", ""), []).append(str(row["seed"]))
    where = "; ".join(f"seeds {', '.join(dict.fromkeys(seeds))} on {place}"
                      for place, seeds in places.items()) if len(places) > 1 else ""
    told += [f"They ran: {where}."] if where else []
    return f"The runs end at {ended}. {' '.join(told)}"


def _training_steps(result: dict[str, Any]) -> list[str]:
    lines = ["| model | batch | precision | tilewise, ms a step | torch's best form, ms | of it | "
             "by rounds |", "|---|--:|---|--:|--:|--:|--:|"]
    return [*lines, *(f"| {row['model']} | {row['batch']} | {row['precision']} | "
                      f"**{row['seconds'] * 1e3:.0f}** | {row['torch'] * 1e3:.0f} ({row['best']}) "
                      f"| **{row['ratio']:.2f}x** | {row['rounds']:.2f}x |"
                      for row in result["rows"])]


def _training_blocks(result: dict[str, Any]) -> list[str]:
    lines = ["| part | blocks | wrong | with plans of ours in all directions | worst error | "
             "torch's in float32 |", "|---|--:|--:|--:|--:|--:|"]
    return [*lines, *(f"| {row['part']} | {row['blocks']} | {row['wrong']} | "
                      f"{row['all_directions']} | {row['ours']:.0e} | {row['torch']:.0e} |"
                      for row in result["rows"])]


def _filter2d(result: dict[str, Any]) -> list[str]:
    lines = ["| image, kernel | tilewise, `out=` | fresh output | OpenCV, `dst=` | fresh output | "
             "two-thread copy | OpenCV / tilewise | scipy / tilewise |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        ms = [f"{row['seconds'][name] * 1e3:.3g}" for name in
              ("tilewise", "tilewise fresh", "opencv", "opencv fresh", "copy")]
        kind = "rank 1, " if row["separable"] else ""
        scipy = f"{row['slow']['scipy']:.0f}" if "scipy" in row["slow"] else ""
        lines.append(f"| {row['dtype']} {row['size']}, {kind}{row['taps']}x{row['taps']} | "
                     f"{' | '.join(ms)} | {_filter_ratio(row):.1f} | {scipy} |")
    dense = [row for row in result["rows"] if row["slow"] and row["dtype"] == "float32"]
    ratios = [_filter_ratio(row) for row in dense]
    torchs = [row["slow"]["torch"] for row in dense if "torch" in row["slow"]]
    return [*lines, "", f"Milliseconds. The geometric mean over the dense kernels of float32 up to "
            f"{max(row['taps'] for row in dense)}x{max(row['taps'] for row in dense)} is "
            f"{statistics.geometric_mean(ratios):.2f} times OpenCV's speed, the least "
            f"{min(ratios):.1f}. Torch's `conv2d` takes {min(torchs):.0f} to {max(torchs):.0f} "
            "times as long as tilewise."]


def _images(result: dict[str, Any]) -> list[str]:
    lines = ["| filter, image | tilewise ms | OpenCV ms | scipy ms | copy ms | OpenCV / tilewise | "
             "scipy / tilewise |", "|---|--:|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        found = row["seconds"]
        ratios = [f"{found[who] / found['tilewise']:.1f}" if who in found else ""
                  for who in ("opencv", "scipy")]
        ms = [_ms(found.get(who)) for who in ("tilewise", "opencv", "scipy", "copy")]
        lines.append(f"| {row['filter']}, {row['dtype']} {row['size']} | "
                     f"{' | '.join((*ms, *ratios))} |")
    means = [_mean_over(result["rows"], who) for who in ("opencv", "scipy")]
    return [*lines, "", "Sizes are sides of grey images; the photo has 4000x3000 pixels of three "
            f"colours. Geometric mean: {means[0]} OpenCV's speed, {means[1]} scipy's."]


def _images_equal(result: dict[str, Any]) -> list[str]:
    sums = [sum(row[name] for row in result["rows"]) for name in ("calls", "native", "differences")]
    return ["| calls | by generated code | beyond the bound |", "|--:|--:|--:|",
            f"| {' | '.join(map(str, sums))} |"]


def _images_large(result: dict[str, Any]) -> list[str]:
    lines = ["| filter, array | tilewise s | scipy s | scipy / tilewise | memory MB |",
             "|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        found = row["seconds"]
        scipy = (f"{found['scipy']:.1f}", f"{found['scipy'] / found['tilewise']:.1f}") \
            if "scipy" in found else ("", "")
        memory = f"{row['megabytes']:.0f}" if "megabytes" in row else ""
        lines.append(f"| {row['filter']}, {row['dtype']} {row['size']} | "
                     f"{found['tilewise']:.3g} | {' | '.join((*scipy, memory))} |")
    return [*lines, "", "Memory is the growth of the process while it filters, mapped pages of "
            "files included."]


def _mean_over(rows: list[dict[str, Any]], who: str) -> str:
    ratios = [row["seconds"][who] / row["seconds"]["tilewise"] for row in rows
              if who in row["seconds"]]
    return f"{statistics.geometric_mean(ratios):.2f} times (least {min(ratios):.2f})"


def _filter_ratio(row: dict[str, Any]) -> float:
    return float(row["seconds"]["opencv"] / row["seconds"]["tilewise"])


def _zoo_equal(result: dict[str, Any]) -> list[str]:
    """Of each kind of question the worst of our errors, torch's own beside it."""
    asked = ("eval", "switched", "training")
    lines = ["| model | result | modes switched | five steps |", "|---|--:|--:|--:|"]
    for row in result["rows"]:
        cells = {name.removesuffix(" p=0"): cell for name, cell in row.items()
                 if isinstance(cell, dict)}
        lines.append(f"| {row['subject']} | "
                     + " | ".join(_verdict(cells[name]) for name in asked) + " |")
    return lines


def _verdict(cell: dict[str, Any]) -> str:
    worst = max(cell.values(), key=lambda c: (not c["equal"], c["ours"]))
    return f"{'' if worst['equal'] else 'differs: '}{worst['ours']:.0e} ({worst['torch']:.0e})"


def _zoo(result: dict[str, Any]) -> list[str]:
    lines = ["| model | by rounds | of torch's best | tilewise ms | torch's best ms | its form | "
             "eager ms | first call s |", "|---|--:|--:|--:|--:|---|--:|--:|"]
    for row in sorted(result["rows"], key=lambda row: -row["by_rounds"]):
        median = row["median"]
        lines.append(f"| {row['subject']} | {row['by_rounds']:.2f} | {row['ratio']:.2f} | "
                     f"{_ms(median['tilewise'])} | {_ms(median[row['best']])} | "
                     f"{row['best'].replace('_', '-')} | {_ms(median['eager'])} | "
                     f"{row['first_call']['tilewise']:.1f} |")
    return [*lines, "", _zoo_mean(result)]


ENGINES = {"eager": "eager", "channels_last": "channels-last", "compiled": "`torch.compile`",
           "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO f32",
           "openvino_default": "OpenVINO, its default", "tilewise": "**tilewise**"}


def _zoo_engines(result: dict[str, Any]) -> list[str]:
    """The models that ran in other engines too: median milliseconds."""
    ran = {who: name for who, name in ENGINES.items()
           if any(who in row["median"] for row in result["rows"])}
    lines = [f"| model, ms | {' | '.join(ran.values())} |", "|---|" + "--:|" * len(ran)]
    rows = [row for row in result["rows"] if set(row["median"]) - {"tilewise", *list(ENGINES)[:3]}]
    for row in sorted(rows, key=lambda row: -row["by_rounds"]):
        cells = [_ms(row["median"].get(who)) for who in ran]
        lines.append(f"| {row['subject']} | {' | '.join(cells)} |")
    return lines


def _zoo_mean(result: dict[str, Any]) -> str:
    ratios = [row["by_rounds"] for row in result["rows"]]
    eager = [row["median"]["eager"] / row["median"]["tilewise"] for row in result["rows"]]
    better, worse = (sum(map(test, ratios)) for test in (lambda x: x > 1.05, lambda x: x < 0.95))
    return (f"Geometric mean of {len(ratios)} models: {statistics.geometric_mean(ratios):.2f} "
            f"times the speed of PyTorch's best form, and {statistics.geometric_mean(eager):.2f} "
            f"times that of eager PyTorch. {better} models gain more than 5 %, {worse} lose more "
            f"than 5 %, {len(ratios) - better - worse} tie.")


def _compatibility(result: dict[str, Any]) -> list[str]:
    """A row for each torch, a column for each Python."""
    pythons = sorted({row["python"] for row in result["rows"]}, key=lambda name: (len(name), name))
    lines = [f"| torch | {' | '.join(f'Python {python}' for python in pythons)} |",
             "|---" * (len(pythons) + 1) + "|"]
    for asked in dict.fromkeys(row["asked"] for row in result["rows"]):
        found = {row["python"]: row for row in result["rows"] if row["asked"] == asked}
        torch = {row["versions"].get("torch", asked).partition("+")[0] for row in found.values()}
        cells = [_uses(found[python]["uses"]) if python in found else "not tried"
                 for python in pythons]
        lines.append(f"| {' | '.join((', '.join(sorted(torch)), *cells))} |")
    names = ("numpy", "llvmlite")
    others = {name: sorted({row["versions"][name] for row in result["rows"] if row["versions"]})
              for name in names}
    return [*lines, "", "Beside " + ", ".join(f"{name} {' or '.join(others[name])}"
                                              for name in names) + "."]


def _uses(uses: dict[str, str]) -> str:
    """`all`, or what was not done and why."""
    return "; ".join(f"{use}: {escape(said)}" for use, said in uses.items()
                     if said != "yes") or "all"


def _arm(result: dict[str, Any]) -> list[str]:
    lines = ["| machine | row | qemu's CPU | problems | calls of kernels | wrong | worst error, of "
             "its bound | seconds |", "|---|---|---|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        lines.append(f"| {row['machine']} | `{row['isa']}` | `{row['cpu']}` | {row['problems']:,} "
                     f"| {row['calls']:,} | {len(row['failures'])} | {row['worst']:.0%} "
                     f"| {row['seconds']} |")
    planted = [f"Of {row['faults']['planted']} faults planted on {row['machine']}, "
               f"{len(row['faults']['unseen'])} were not noticed."
               for row in result["rows"] if "faults" in row]
    return [*lines, "", *planted]


def _deep(result: dict[str, Any]) -> list[str]:
    """Counts for each ISA row, and the worst error of all."""
    rows = list(dict.fromkeys(row["row"] for row in result["rows"]))
    names = dict.fromkeys((row["part"], name) for row in result["rows"] for name in row["ran"])
    lines = [f"| | {' | '.join(rows)} | worst error, of its bound |",
             f"|---|{'--:|' * len(rows)}--:|"]
    for part, name in names:
        own = [row for row in result["rows"] if row["part"] == part and name in row["ran"]]
        counts = [sum(row["ran"][name] for row in own if row["row"] == isa) for isa in rows]
        lines.append(f"| {name if part in ('networks', 'learning') else f'`{name}`'} | "
                     f"{' | '.join(f'{count:,}' for count in counts)} "
                     f"| {max(row['worst'][name] for row in own):.2f} |")
    parts = dict.fromkeys(row["part"] for row in result["rows"])
    return [*lines, "", "| | tests | runs | codes compiled | wrong | seconds of a core | each |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *(_deep_part(part, [row for row in result["rows"] if row["part"] == part])
              for part in parts)]


def _deep_part(part: str, rows: list[dict[str, Any]]) -> str:
    tests, runs = (sum(sum(row[name].values()) for row in rows) for name in ("ran", "runs"))
    codes, cpu = sum(row["codes"] for row in rows), sum(row["cpu"] for row in rows)
    wrong = sum(len(row["wrong"]) for row in rows)
    return (f"| {part} | {tests:,} | {runs:,} | {codes:,} | {wrong} | {cpu:,.0f} "
            f"| {1e3 * cpu / max(tests, 1):,.1f} ms |")


def _checked_faults(result: dict[str, Any]) -> list[str]:
    """Kinds of faults, as tests/support/seeded.py names them."""
    names = {"offset": "an address is some elements off", "mask": "a mask is left out",
             "word": "a size in the frame is wrong", "extent": "a memory is smaller than told"}
    lines = ["| fault | drawn | leave their memory | found | missed |", "|---|--:|--:|--:|--:|"]
    for kind, name in names.items():
        drawn = [row for row in result["rows"] if row["kind"] == kind]
        real = [row for row in drawn if row["found"] is not None]
        found = sum(row["found"] for row in real)
        lines.append(f"| {name} | {len(drawn)} | {len(real)} | {found} | {len(real) - found} |")
    settings = result["settings"]
    return [*lines, "", f"The same {settings['calls']} calls without a fault: "
                        f"{len(settings['false_alarms'])} false alarms."]


def _faults(result: dict[str, Any]) -> list[str]:
    """Kills, hostile files and scarce resources."""
    rows = result["rows"]
    parts = {part: [row for row in rows if row["part"] == part]
             for part in ("kills", "files", "limits")}
    columns = {"kills": ("kills", "timed", "aimed", "unreadable", "lost", "wrong", "hung"),
               "files": ("files", "used", "refused", "wrong", "hung", "executed")}
    heads = {"kills": "| work | kills | at a random time | before a change of a file | unreadable "
                      "afterwards | lost | wrong later | hung |",
             "files": "| file | hostile ones | went on | refused | wrong | hung | executed |"}
    lines = []
    for part, names in columns.items():
        lines += [heads[part], "|---|" + "--:|" * len(names)]
        lines += [f"| {row['what']} | {' | '.join(f'{row[name]:,}' for name in names)} |"
                  for row in parts[part]]
        sums = [sum(row[name] for row in parts[part]) for name in names]
        lines += [f"| **all** | {' | '.join(f'**{number:,}**' for number in sums)} |", ""]
    lines += ["| work where something is scarce | ended | faults |", "|---|---|--:|"]
    lines += [f"| {row['what']} | {row['ended']} | {len(row.get('faults', []))} |"
              for row in parts["limits"]]
    return [*lines, "", f"{sum(len(row.get('faults', [])) for row in rows)} faults in all; "
                        f"{result['settings']['seconds']:,} s."]


def _arm_debian(result: dict[str, Any]) -> list[str]:
    lines = ["| in an emulated Debian for arm64 | passed | seconds |", "|---|---|--:|"]
    lines += [f"| {row['told']} | {_passed(row)} | {row['seconds']} |" for row in result["rows"]]
    model = next(row for row in result["rows"] if row["check"] == "resnet18")
    return [*lines, "", f"ResNet-18: {model['generated']} of {model['layers']} layers run "
            f"generated code. Its relative error against float64 is {model['error']:.1e}, and "
            f"torch's {model['error_of_torch']:.1e}. It compiled {model['compiled']} kernels; the "
            "second process compiled none.", *_lost_threads(result["rows"])]


def _lost_threads(rows: list[dict[str, Any]]) -> list[str]:
    """What torch does by itself in a forked child."""
    hangs = {row.get("torch_hangs_on_one_thread") for row in rows} - {None}
    return ["", "In another forked child there, one convolution of torch's own, on one thread, "
            f"{'did not end' if hangs.pop() else 'ended'}."] if hangs else []


def _passed(row: dict[str, Any]) -> str:
    if "uses" in row:
        return _uses(row["uses"])
    return "yes" if row["passed"] else "no"


def _gpu_audit(result: dict[str, Any]) -> list[str]:
    from tilewise.tools.gpu_audit import Row, as_markdown

    return as_markdown(Row(**row) for row in result["rows"]).splitlines()


def _claims(result: dict[str, Any]) -> list[str]:
    return ["| what | wanted | found |", "|---|---|---|",
            *(f"| {row['what']} | {row['wanted']} | {row['found']} |" for row in result["rows"])]


def _bfloat16(result: dict[str, Any]) -> list[str]:
    """A line for each model: times with errors, torch's in its best form."""
    lines = ["| model | batch | tilewise ms | error | torch's best ms | error | of torch's best | "
             "by rounds | tilewise float32 ms | OpenVINO's default ms | error |",
             "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        times, errors, best = row["times"], row["errors"], row["best"]
        peer = "openvino_default"
        lines.append(f"| {row['model']} | {row['batch']} | **{_ms(times['tilewise'])}** | "
                     f"{errors['tilewise']:.1e} | {_ms(times[best])} ({best}) | "
                     f"{errors[best]:.1e} | **{row['ratio']:.1f}x** | {row['paired']:.1f}x | "
                     f"{_ms(times['tilewise float32'])} | {_ms(times.get(peer))} | "
                     f"{_format(errors.get(peer), 1, '.1e')} |")
    return lines


def _medium(result: dict[str, Any]) -> list[str]:
    """A line for each float32 model under "medium", beside the engine that rounds by itself."""
    lines = ["| model | batch | tilewise ms | error | OpenVINO's default ms | error | of OpenVINO "
             "| by rounds | images | ms with float32, bfloat16 images | \"high\" ms "
             "| \"highest\" ms |",
             "|---|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|"]
    for row in result["rows"]:
        times, errors, best = row["times"], row["errors"], row["best"]
        both = ", ".join(_ms(times[f"{kind} images"]) for kind in ("float32", "bfloat16"))
        lines.append(f"| {row['model']} | {row['batch']} | **{_ms(times['tilewise'])}** | "
                     f"{errors['tilewise']:.1e} | {_ms(times[best])} | {errors[best]:.1e} | "
                     f"**{row['ratio']:.2f}x** | {row['paired']:.2f}x | {row['chosen']} | {both} | "
                     f"{_ms(times['high'])} | {_ms(times['highest'])} |")
    return [*lines, "", _means(result["rows"])]


def _means(rows: list[dict[str, Any]]) -> str:
    """Geometric means of what the rows say."""
    of, paired, high, in_turn = (statistics.geometric_mean(row[key] for row in rows)
                                 for key in ("ratio", "paired", "high", "high_paired"))
    return (f"In the geometric mean {of:.2f}x OpenVINO's default, {paired:.2f}x by rounds; "
            f"\"high\" is {high:.2f}x \"highest\", {in_turn:.2f}x by rounds.")


def _vdpbf16ps(result: dict[str, Any]) -> list[str]:
    """A line for each layer."""
    who = ("float32", "float32 images", "bfloat16 images", "torch bfloat16")
    lines = ["| layer | float32, us | bfloat16 products, float32 images | with bfloat16 images | "
             "torch, bfloat16 | of float32 |", "|---|--:|--:|--:|--:|--:|"]
    for row in result["rows"]:
        times = " | ".join(_format(row["seconds"][name], 1e6, ".0f") for name in who)
        lines.append(f"| {row['layer']} | {times} | {row['ratio']:.2f}x |")
    return lines


def _ms(seconds: float | None) -> str:
    """Milliseconds, three digits of them or all before the point."""
    return _format(seconds, 1e3, ".0f" if (seconds or 0) >= 0.1 else ".3g")


def _format(value: float | None, scale: float, how: str) -> str:
    return "" if value is None else format(value * scale, how)


KINDS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "bench": _bench, "ladder": _ladder, "errors": _errors, "algorithms": _algorithms,
    "training": _training, "filter2d": _filter2d, "images": _images,
    "images-equal": _images_equal, "images-large": _images_large, "gpu-audit": _gpu_audit,
    "zoo-equal": _zoo_equal, "zoo": _zoo, "compatibility": _compatibility,
    "arm": _arm, "arm-debian": _arm_debian, "bfloat16": _bfloat16,
    "medium": _medium, "vdpbf16ps": _vdpbf16ps,
    "checked-faults": _checked_faults, "faults": _faults, "claims": _claims, "deep": _deep,
    "training-seeds": _training_seeds, "training-blocks": _training_blocks,
    "training-steps": _training_steps}


def rewritten(text: str, results: Path = RESULTS) -> str:
    """The text with every table as its file says."""
    def one(match: re.Match[str]) -> str:
        result = json.loads((results / match["name"]).read_text())
        mark = match[0].partition("\n")[0]
        return f"{mark}\n{table(result, match['part'])}<!-- end -->"

    return MARK.sub(one, text)


def write(results: Path = RESULTS, check: bool = False) -> list[str]:
    """Rewrite the pages; returns the names of those that were not as their files say."""
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        new = rewritten(text, results)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    return stale


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    stale = write(check=check)
    print(("stale: " if check else "rewritten: ") + (", ".join(stale) or "nothing"))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
