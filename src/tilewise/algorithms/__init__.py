"""One method a file; these lists are the only ones."""

from ..core.algorithm import Algorithm
from .cpu_depthwise import CpuDepthwise
from .cpu_depthwise_weight import CpuDepthwiseWeight
from .cpu_direct import CpuDirect
from .cpu_direct_matrix import CpuDirectMatrix
from .cpu_direct_weight import CpuDirectWeight
from .cpu_direct_weight_matrix import CpuDirectWeightMatrix
from .cpu_few_rows import CpuFewRows
from .cpu_phases import CpuPhases
from .cpu_pixels import CpuPixels
from .cpu_pointwise import CpuPointwise
from .cpu_winograd import CpuWinograd
from .cpu_winograd_matrix import CpuWinogradMatrix
from .cpu_winograd_weight import CpuWinogradWeight
from .cpu_winograd_weight_matrix import CpuWinogradWeightMatrix
from .filter_bells import FilterBells
from .filter_direct import FilterDirect
from .filter_fft import FilterFft
from .filter_guarded import FilterGuarded
from .filter_histogram import FilterHistogram
from .filter_means import FilterMeans
from .filter_network import FilterNetwork
from .filter_running import FilterRunning
from .filter_separable import FilterSeparable
from .filter_taps import FilterTaps
from .gpu_implicit_gemm import GpuImplicitGemm
from .gpu_winograd import GpuWinograd
from .reference import Reference
from .vendor import Vendor

ALGORITHMS: list[Algorithm] = [
    CpuDepthwise(),
    CpuPointwise(),
    CpuWinograd(),
    CpuPixels(),
    CpuDirect(),
    CpuFewRows(),
    CpuFewRows(24),
    CpuFewRows(16),
    CpuWinogradMatrix(6),
    CpuWinogradMatrix(3),
    CpuDirectMatrix(6),
    CpuDirectMatrix(3),
    CpuDirectMatrix(1),
    CpuPhases("cpu_phases", [CpuDirect()]),
    CpuPhases("cpu_phases_winograd", [CpuDirect(), CpuWinograd()]),
    CpuPhases("cpu_phases_bf16x6", [CpuDirect(), CpuWinograd(), CpuDirectMatrix(6),
                                    CpuWinogradMatrix(6)]),
    CpuPhases("cpu_phases_bf16x3", [CpuDirectMatrix(3), CpuWinogradMatrix(3)]),
    CpuPhases("cpu_phases_bf16x1", [CpuDirectMatrix(1)]),
    CpuDepthwiseWeight(),
    CpuWinogradWeight(),
    CpuDirectWeight(),
    CpuWinogradWeightMatrix(6),
    CpuWinogradWeightMatrix(3),
    CpuDirectWeightMatrix(6),
    CpuDirectWeightMatrix(3),
    CpuDirectWeightMatrix(1),
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

# methods of image filters, which are asked with filters instead of problems
FILTERS: list[Algorithm] = [
    FilterSeparable(),
    FilterDirect(),
    FilterFft(),
    FilterRunning(),
    FilterNetwork(),
    FilterHistogram(),
    FilterMeans(),
    FilterBells(),
    FilterGuarded(),
    FilterTaps(),
]
