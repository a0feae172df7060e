"""The schedules shipped for GPUs: by direction, kind of product and architecture.

A row is BMxBNxBK, warps, stages and the order of the weight; `flat` rows take the channels of
all taps in one go, for convolutions with few of them. `tilewise.gpu_audit` compiles every row for
the real targets, and a row that spills or loads narrowly does not stay.
"""

from __future__ import annotations

import re
from functools import lru_cache

from ..core.schedule import Schedule

NVIDIA = ("sm_80", "sm_90", "sm_100")
KINDS = ("half", "ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")

_FORWARD = {
    ("half", *NVIDIA): ("128x128x64 w8 s3 krsc", "128x128x64 w8 s3 rsck", "128x64x64 w4 s3 krsc",
                        "64x64x64 w4 s3 krsc"),
    ("half", "sm_80"): ("64x64x32 w4 s2 krsc flat",),
    ("half", "sm_90", "sm_100"): ("128x64x32 w4 s2 krsc flat",),
    ("half", "gfx942"): ("128x128x64 w8 s2 krsc", "128x128x64 w8 s2 rsck", "128x64x64 w4 s2 krsc",
                         "64x64x64 w4 s2 krsc", "128x64x32 w4 s2 krsc flat"),
    ("ieee", *NVIDIA): ("128x128x32 w8 s2 rsck", "128x128x16 w8 s3 rsck", "128x64x16 w4 s3 rsck",
                        "64x64x16 w4 s3 rsck"),
    ("ieee", "sm_80", "sm_100"): ("64x64x16 w8 s2 rsck flat",),
    ("ieee", "sm_90"): ("64x64x16 w4 s2 rsck flat",),
    ("ieee", "gfx942"): ("128x128x16 w8 s2 rsck", "128x128x16 w8 s2 krsc", "128x64x16 w4 s2 rsck",
                         "64x64x16 w4 s2 rsck", "128x64x16 w4 s2 rsck flat"),
    ("tf32", *NVIDIA): ("128x128x32 w8 s3 krsc", "128x64x32 w4 s3 krsc", "64x64x32 w4 s3 krsc",
                        "128x64x32 w4 s2 krsc flat"),
    ("tf32x3", *NVIDIA): ("128x64x32 w8 s3 krsc", "64x64x32 w4 s2 krsc",
                          "64x64x32 w4 s2 krsc flat"),
    ("bf16x3", *NVIDIA, "gfx942"): ("128x64x32 w8 s2 krsc", "64x64x32 w4 s2 krsc",
                                    "64x64x32 w4 s2 krsc flat"),
    ("bf16x6", *NVIDIA, "gfx942"): ("128x64x32 w8 s2 krsc", "64x64x32 w4 s2 krsc",
                                    "64x64x32 w8 s2 krsc flat"),
}

# rows of the weight are columns here: what is the inner index forward is the outer one backward
_BACKWARD_DATA = {
    key: tuple(row.replace("krsc", "K").replace("rsck", "krsc").replace("K", "rsck")
               for row in rows)
    for key, rows in _FORWARD.items()}

_BACKWARD_WEIGHT = {
    ("half", *NVIDIA): ("128x128x32 w8 s3", "128x64x32 w4 s3", "64x64x32 w4 s2",
                        "64x64x32 w4 s2 flat"),
    ("half", "gfx942"): ("128x128x32 w8 s2", "128x64x32 w4 s2", "64x64x32 w4 s2",
                         "64x64x32 w4 s2 flat"),
    ("ieee", *NVIDIA): ("128x128x16 w8 s2", "64x64x16 w4 s2", "64x64x16 w8 s2 flat"),
    ("ieee", "gfx942"): ("128x128x16 w8 s2", "64x64x16 w4 s2", "64x64x16 w4 s2 flat"),
    ("tf32", *NVIDIA): ("128x128x32 w8 s3", "64x64x32 w4 s2", "64x64x32 w4 s2 flat"),
    ("tf32x3", *NVIDIA): ("128x64x32 w8 s2", "64x64x32 w4 s2", "64x64x32 w4 s2 flat"),
    ("bf16x3", *NVIDIA, "gfx942"): ("128x64x32 w8 s2", "64x64x32 w4 s2", "64x64x32 w4 s2 flat"),
    ("bf16x6", *NVIDIA, "gfx942"): ("64x64x32 w4 s2",),
    ("bf16x6", "sm_80", "sm_90", "gfx942"): ("64x64x32 w8 s2 flat",),
    ("bf16x6", "sm_100"): ("64x64x32 w4 s2 flat",),
}

# tiles x channels of one program of Winograd's transforms: 128 bits a thread, or it spills
_TRANSFORMS = {
    ("half", *NVIDIA): "16x64 w4",
    ("half", "gfx942"): "32x64 w4",
    ("f32", *NVIDIA): "8x64 w4",
    ("f32", "gfx942"): "16x64 w4",
}

_SPILLS = {("half", "sm_100"): (128, 64, 64)}  # between the transforms, though not forward

TABLE = {"forward": _FORWARD, "backward_data": _BACKWARD_DATA,
         "backward_weight": _BACKWARD_WEIGHT}
_ROW = re.compile(r"(?P<bm>\d+)x(?P<bn>\d+)x(?P<bk>\d+) w(?P<warps>\d) s(?P<stages>\d)"
                  r"(?: (?P<weight>krsc|rsck))?(?P<flat> flat)?")


@lru_cache(maxsize=256)
def rows(direction: str, kind: str, arch: str) -> tuple[Schedule, ...]:
    """The schedules of a kind of product on an architecture; none where it has no such product."""
    found = [row for (name, *archs), texts in TABLE[direction].items()
             if name == kind and arch in archs for row in texts]
    return tuple(_parse(row, direction) for row in found)


@lru_cache(maxsize=64)
def products_between(kind: str, arch: str) -> tuple[Schedule, ...]:
    """Of the forward schedules, those that multiply between Winograd's transforms."""
    return tuple(Schedule(**{name: value for name, value in row.items() if name != "flat"})
                 for row in rows("forward", kind, arch)
                 if not row["flat"] and (row.bm, row.bn, row.bk) != _SPILLS.get((kind, arch)))


@lru_cache(maxsize=64)
def transform(kind: str, arch: str) -> dict[str, int]:
    """The tunables of Winograd's transforms."""
    text, = (row for (name, *archs), row in _TRANSFORMS.items()
             if name == ("half" if kind == "half" else "f32") and arch in archs)
    tiles, channels, warps = map(int, re.findall(r"\d+", text))
    return {"tiles": tiles, "channels": channels, "transform_warps": warps}


def _parse(text: str, direction: str) -> Schedule:
    match = _ROW.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read the schedule {text!r}")
    sizes = {name: int(match[name]) for name in ("bm", "bn", "bk", "warps", "stages")}
    last = {"split": "parts"} if direction == "backward_weight" else {"weight": match["weight"]}
    return Schedule(**sizes, flat=bool(match["flat"]), swizzle=8, **last)
