"""Image filters with the arguments and the results of scipy.ndimage, and filter2d."""

from .blocks import in_blocks, on_dask, reach
from .explain import explain
from .linear import (
    convolve,
    correlate,
    gaussian,
    gaussian_gradient_magnitude,
    gaussian_laplace,
    laplace,
    prewitt,
    scharr,
    sobel,
    uniform,
)
from .orders import (
    grey_closing,
    grey_dilation,
    grey_erosion,
    grey_opening,
    maximum,
    median,
    minimum,
    percentile,
    rank,
)
from .sharpen import unsharp_mask

# scipy's names for the same, so that `from tilewise import image as ndimage` is enough
gaussian_filter, uniform_filter = gaussian, uniform
maximum_filter, median_filter, minimum_filter = maximum, median, minimum
percentile_filter, rank_filter = percentile, rank

__all__ = ["convolve", "correlate", "explain", "gaussian", "gaussian_filter",
           "gaussian_gradient_magnitude", "gaussian_laplace", "grey_closing", "grey_dilation",
           "grey_erosion", "grey_opening", "in_blocks", "laplace", "maximum", "maximum_filter",
           "median", "median_filter", "minimum", "minimum_filter", "on_dask", "percentile",
           "percentile_filter", "prewitt", "rank", "rank_filter", "reach", "scharr", "sobel",
           "uniform", "uniform_filter", "unsharp_mask"]
