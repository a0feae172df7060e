"""One method a file; these lists are the only ones."""

from ..core.algorithm import Algorithm
from .cpu_depthwise import CpuDepthwise
from .cpu_depthwise_weight import CpuDepthwiseWeight
from .cpu_direct import CpuDirect
from .cpu_direct_weight import CpuDirectWeight
from .cpu_few_rows import CpuFewRows
from .cpu_linear import CpuLinear
from .cpu_pixels import CpuPixels
from .cpu_pointwise import CpuPointwise
from .cpu_winograd import CpuWinograd
from .cpu_winograd_weight import CpuWinogradWeight
from .filter_direct import FilterDirect
from .filter_fft import FilterFft
from .filter_separable import FilterSeparable
from .gpu_implicit_gemm import GpuImplicitGemm
from .gpu_winograd import GpuWinograd
from .reference import Reference
from .torch_linear import TorchLinear
from .vendor import Vendor

ALGORITHMS: list[Algorithm] = [
    CpuDepthwise(),
    CpuPointwise(),
    CpuWinograd(),
    CpuPixels(),
    CpuDirect(),
    CpuDepthwiseWeight(),
    CpuWinogradWeight(),
    CpuDirectWeight(),
    GpuImplicitGemm(),
    GpuImplicitGemm("bf16x6"),
    GpuImplicitGemm("tf32x3"),
    GpuImplicitGemm("bf16x3"),
    GpuImplicitGemm("tf32"),
    GpuWinograd(),
    GpuWinograd("bf16x6"),
    GpuWinograd("tf32x3"),
    Vendor(),
    Reference(),
]

# methods of filter2d
FILTERS: list[Algorithm] = [
    FilterSeparable(),
    FilterDirect(),
    FilterFft(),
]

# of linear layers
LINEAR: list[Algorithm] = [
    CpuLinear(),
    CpuFewRows(),
    TorchLinear(),
]
