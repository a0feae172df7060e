"""Problem strings by network, and a few families of shapes."""

from __future__ import annotations

from ..core.errors import TilewiseError
from ..core.problem import Problem

_VGG = ["c64h224w224k64", "c64h112w112k128", "c128h112w112k128", "c128h56w56k256",
        "c256h56w56k256", "c256h28w28k512", "c512h28w28k512", "c512h14w14k512"]
# without batch, type and epilogue
SHAPES = {
    "vgg": [f"{layer}r3s3p1" for layer in _VGG],
    "vgg_first": ["c3h224w224k64r3s3p1"],
    "vgg_pool": [f"{layer}r3s3p1" for layer in (_VGG[0], _VGG[2])],
    "lenet": ["c1h86w86k4r7s7", "c4h40w40k16r7s7", "c1h70w70k12r5s5", "c12h33w33k24r5s5"],
    "wide_filters": ["c32h56w56k32r5s5p2", "c64h56w56k64r5s5p2", "c32h56w56k32r7s7p3",
                     "c64h56w56k64r7s7p3"],
    "pointwise": ["c64h56w56k256r1s1", "c256h56w56k64r1s1", "c512h28w28k128r1s1",
                  "c256h56w56k512r1s1u2", "c1024h14w14k256r1s1", "c512h7w7k2048r1s1"],
    "depthwise": ["c32h112w112k32r3s3p1g32", "c96h112w112k96r3s3u2p1g96",
                  "c144h56w56k144r3s3p1g144", "c576h14w14k576r3s3p1g576",
                  "c960h7w7k960r3s3p1g960"],
    "small": ["c8h16w16k8r3s3p1", "c16h16w16k16r1s1"],
}


def suite(name: str, batch: int, epilogue: str = "+bias+relu") -> list[Problem]:
    """The problems of a suite.

    >>> str(suite("vgg_first", 8)[0])
    'n8c3h224w224k64r3s3p1_f32_forward+bias+relu'
    """
    if name not in SHAPES:
        raise TilewiseError(f"suite is {name!r}, needs one of {', '.join(SHAPES)}")
    tail = epilogue if epilogue.startswith("+") or not epilogue else f"+{epilogue}"
    return [Problem.parse(f"n{batch}{shape}_f32_forward{tail}") for shape in SHAPES[name]]
