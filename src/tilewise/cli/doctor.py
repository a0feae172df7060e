"""tilewise doctor: what this machine has, what is missing and how to get it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import NO
from .output import Json, Threads, console, print_json, print_table, progress, set_threads

Selftest = Annotated[bool, typer.Option(
    "--selftest", help="Run random problems of every algorithm against float64 instead, for under "
                       "a minute, and print one line. TILEWISE_ISA chooses the instruction set.")]


def doctor(threads: Threads = None, json: Json = False, selftest: Selftest = False) -> None:
    """Describe the machine, its measured limits, versions, and what is missing.

    The exit code is 1 if something is broken.
    """
    if selftest:
        run_selftest(set_threads(threads), json)
        return
    import torch

    from ..bench.health import disturbed, examine
    from ..bench.machine import facts, learn_limits
    from ..core.target import Target

    count = set_threads(threads or torch.get_num_threads())  # as a program would have it
    with progress("measuring") as tell:
        timed = not Target.host().row.emulated
        machine, findings = facts(count, timed, tell), examine(count, tell)
    busy = disturbed(machine) if timed else []
    findings += busy
    if timed and not busy:
        learn_limits(machine)
    broken = any(finding.state == "broken" for finding in findings)
    if json:
        print_json({"machine": machine, "findings": [finding.__dict__ for finding in findings],
                    "healthy": not broken})
    else:
        _print(machine, findings)
    if broken:
        raise typer.Exit(NO)


def run_selftest(threads: int, json: bool) -> None:
    from ..bench.machine import facts
    from ..bench.selftest import line, selftest
    from ..core.cores import cores
    from ..core.target import Target

    with progress("testing") as tell:
        found = selftest(Target.host(threads=threads), tell, processes=cores())
    machine = facts(threads, limits=False)
    if json:
        print_json({"machine": machine, **found.__dict__})
    else:
        for text in found.wrong:
            console.print(text, soft_wrap=True, markup=False)
        console.print(line(found, machine), soft_wrap=True, markup=False, highlight=False)
    if found.wrong:
        raise typer.Exit(NO)


def _limits(machine: dict[str, Any]) -> list[tuple[str, str]]:
    if "peak" not in machine:
        return [("limits", "not measured: instructions are emulated")]
    return [("multiply-add peak", f"{machine['peak'] / 1e9:.0f} GFLOP/s, measured"),
            ("memory bandwidth", f"{machine['bandwidth'] / 1e9:.1f} GB/s, measured by a copy")]


def _print(machine: dict[str, Any], findings: list[Any]) -> None:
    def size(count: int) -> str:
        return f"{count >> 20} MB" if count >= 1 << 20 else f"{count >> 10} kB"

    print_table("machine", ("", ""), [
        ("processor", f"{machine['processor']}, {machine['cores']} cores, {machine['system']}"),
        ("instruction set", f"{machine['isa']}: {machine['lanes']} floats a vector, "
                            f"{machine['registers']} registers"),
        ("caches", f"{size(machine['l1'])} and {size(machine['l2'])} a core, "
                   f"{size(machine['l3'])} shared"),
        ("threads", str(machine["threads"])),
        *_limits(machine),
        ("huge pages", machine["huge_pages"]),
        ("versions", ", ".join(f"{name} {text}" for name, text in machine["versions"].items())),
    ], left=2)
    console.print()
    styles = {"ok": "green", "missing": "yellow", "broken": "red"}
    print_table("health", ("", "", ""), [(f.state, f.what, f.advice) for f in findings], left=3,
                styles=[styles[f.state] for f in findings])
