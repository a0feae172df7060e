"""One method a file; this list is the only one."""

from ..core.algorithm import Algorithm
from .cpu_depthwise import CpuDepthwise
from .cpu_direct import CpuDirect
from .cpu_pixels import CpuPixels
from .cpu_pointwise import CpuPointwise
from .cpu_winograd import CpuWinograd
from .cpu_winograd_weight import CpuWinogradWeight
from .reference import Reference
from .vendor import Vendor

ALGORITHMS: list[Algorithm] = [
    CpuDepthwise(),
    CpuPointwise(),
    CpuWinograd(),
    CpuPixels(),
    CpuDirect(),
    CpuWinogradWeight(),
    Vendor(),
    Reference(),
]
