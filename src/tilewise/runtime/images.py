"""Where the values of a tensor lie."""

from __future__ import annotations

from torch import Tensor

Sizes = tuple[int, ...]
Layout = tuple[Sizes, Sizes]  # shape and strides


def pitch_of(shape: Sizes, strides: Sizes) -> int:
    """Floats from a pixel to the next; 0 where these are no channels-last images.

    Strides along a size of one say nothing.
    """
    if len(shape) != 4 or 0 in shape:
        return 0
    (n, c, h, w), (image, channel, row, column) = shape, strides
    pitch = column if w > 1 else row if h > 1 else image if n > 1 else c
    fits = ((c == 1 or channel == 1) and pitch >= c and (h == 1 or row == w * pitch)
            and (n == 1 or image == h * w * pitch))
    return pitch if fits else 0


def is_dense(shape: Sizes, strides: Sizes) -> bool:
    """Whether values fill one stretch of memory, in whatever order; a size of one says nothing."""
    behind = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size > 1):
        if stride != behind:
            return False
        behind *= size
    return True


def as_images(shape: Sizes, strides: Sizes) -> Layout:
    """Volumes (N, C, D, H, W) as images of D * H rows, where they lie so, and signals (N, C, L) as
    images of one row; others as they are."""
    if len(shape) == 3:
        (n, c, length), (image, channel, step) = shape, strides
        return (n, c, 1, length), (image, channel, length * step, step)
    if len(shape) != 5:
        return shape, strides
    (n, c, d, h, w), (image, channel, plane, row, column) = shape, strides
    if d == 1 or plane == h * row:
        return (n, c, d * h, w), (image, channel, row, column)
    return ((n, c, d, w), (image, channel, plane, column)) if h == 1 else (shape, strides)


def without_row(layout: Layout) -> Layout:
    """A signal that was an image of one row."""
    (n, c, _, length), (image, channel, _, step) = layout
    return (n, c, length), (image, channel, step)


def channels_last(shape: Sizes) -> Layout:
    """Images or volumes without gaps."""
    count, strides = shape[1], list[int]()
    for size in reversed(shape[2:]):
        strides.insert(0, count)
        count *= size
    return shape, (count, 1, *strides)


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first value to behind its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()
