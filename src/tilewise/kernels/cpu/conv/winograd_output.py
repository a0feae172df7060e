"""The last step of a Winograd tile: transform back, epilogue, pooling, mask.

A tile that lies inside the image is written as its values come. One that sticks out is
transformed in the place of M, and a loop writes as much of it as is inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..between.epilogue import activate, finish, is_long, pool
from ..between.masks import passes, pixel_bytes, place
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import BIAS, FOUND, MASK, RESIDUAL, Y
from .transforms import transform
from .winograd_geometry import SIZES, Geometry
from .winograd_tiles import Place, first_col, first_row, image_of, outputs_from

Store = Callable[[int, int, Vector], None]


class Output:
    """The functions of a module that finish tiles, for each kind of block of output channels."""

    def __init__(self, m: Module, geometry: Geometry) -> None:
        self.m, self.g, self.p, self.s = m, geometry, geometry.p, geometry.s
        self.loops = is_long(geometry.p.epilogue)  # over pixels, also of whole tiles
        self.whole = {} if self.loops else {end: self._whole(end) for end in geometry.ends}
        self.border = {end: self._border(end) for end in geometry.ends}

    def emit(self, f: Function, z: InCode, tile: Place, m: Pointer, k: Index, end: bool) -> None:
        """Finish the channels k.. of a tile whose products begin at `m`."""
        p, s = self.p, self.s
        top, left = first_row(z, tile), first_col(z, tile)
        conv_h, conv_w = z.conv_h, z.conv_w
        image = image_of(z, tile)
        to = at = self.g.y_at(z, image, top, left) + k
        if p.epilogue.pool == 2:
            to = ((tile.image * z.out_h + tile.row * (s.tile_h // 2)) * z.out_w
                  + tile.col * (s.tile_w // 2)) * p.k + k
        args: list[Any] = [f.frame, m, f.frame.load_pointer(BIAS) + k,
                           f.frame.load_pointer(RESIDUAL, self.g.image) + at,
                           f.frame.load_pointer(Y, self.g.image) + to]
        if p.epilogue.mask:
            pixel = (image * conv_h + top) * conv_w + left
            args.append(place(f.frame.load_pointer(MASK), k, p.k, pixel))
        height = outputs_from(top, conv_h, p.dilation[0])
        width = outputs_from(left, conv_w, p.dilation[1])
        if self.loops:
            f.call(self.border[end], *args, height.minimum(s.tile_h), width.minimum(s.tile_w))
            return
        with f.either((height >= s.tile_h) & (width >= s.tile_w)) as (inside, border):
            with inside:
                f.call(self.whole[end], *args)
            with border:
                f.call(self.border[end], *args, height.minimum(s.tile_h), width.minimum(s.tile_w))

    def _function(self, name: str, end: bool, **more: Any) -> Function:
        kinds: Any = {"frame": "pointer", "m": "pointer", "bias": "pointer",
                      "residual": self.g.image, "y": self.g.image}
        if self.p.epilogue.mask:
            kinds["mask"] = "pointer"
        return self.m.function(f"output_{name}{'_end' if end else ''}", **kinds, **more)

    def _whole(self, end: bool) -> Function:
        with self._function("whole", end) as f:
            at = _Tile(f, self.g)
            self._each_vector(f, end, lambda k, count, total: self._inside(at, k, count, total))
        return f

    def _border(self, end: bool) -> Function:
        with self._function("border", end, height="index", width="index") as f:
            at = _Tile(f, self.g)
            self._each_vector(f, end, lambda k, count, total: self._cut_off(at, k, count, total))
        return f

    def _each_vector(self, f: Function, end: bool,
                     body: Callable[[Index, int, Vector], Vector]) -> None:
        """body(first channel, how many, total) returns the total with all values added to it."""
        lanes, channels = self.g.lanes, self.g.channels(end)
        whole = channels // lanes * lanes
        with f.loop(whole, step=lanes, carry=[f.vector(0.0)]) as k:
            k.values = [body(k.i, lanes, k.values[0])]
        total = k.values[0]
        if channels > whole:
            total = body(f.index(whole), channels - whole, total)
        with f.when((total - total).is_nan().any()):  # also where it is infinite
            f.frame.store_index(FOUND, 1)

    def _back(self, f: Function, k: Index, total: Vector, store: Store) -> Vector:
        """store(row, column, value) of a tile; returns the total with its values added."""
        g, m = self.g, f.m + k

        def load(i: int, j: int) -> Vector:
            return m.load(g.m_at(i, j))

        def keep(i: int, j: int, value: Vector) -> None:
            nonlocal total
            total = total + value
            store(i, j, value)

        transform(f, g.down.AT, g.across.AT, load, keep)
        return total

    def _inside(self, at: _Tile, k: Index, count: int, total: Vector) -> Vector:
        """All of a tile, each value or window as soon as it is there."""
        found: dict[tuple[int, int], Vector] = {}

        def keep(i: int, j: int, value: Vector) -> None:
            if self.p.epilogue.pool == 1:
                self._pixel(at, k, count, (i, j), value)
                return
            found[i, j] = value
            if i % 2 and j % 2:  # the last of its window
                window = _window(i - 1, j - 1)
                self._pooled(at, k, count, window, [found.pop(pixel) for pixel in window])

        return self._back(at.f, k, total, keep)

    def _cut_off(self, at: _Tile, k: Index, count: int, total: Vector) -> Vector:
        """The pixels or windows of a tile that are inside; other pixels pass no gradient."""
        f, g, size = at.f, self.g, self.p.epilogue.pool
        m = f.m + k
        total = self._back(f, k, total, lambda i, j, value: m.store(value, g.m_at(i, j)))
        if size == 1:
            with f.loop(f.height) as i, f.loop(f.width) as j:
                self._pixel(at, k, count, (i.i, j.i), m.load(g.m_at(i.i, j.i)))
            return total
        if self.p.epilogue.mask:
            zero = f.vector(0.0)
            with f.loop(f.height) as i, f.loop(f.width) as j:
                at.mask(k, i.i, j.i).store_bits(zero.above(zero))
        with f.loop(f.height // 2) as i, f.loop(f.width // 2) as j:
            window = _window(i.i * 2, j.i * 2)
            self._pooled(at, k, count, window, [m.load(g.m_at(*pixel)) for pixel in window])
        return total

    def _pixel(self, at: _Tile, k: Index, count: int, pixel: tuple[Any, Any],
               value: Vector) -> None:
        f, epilogue = at.f, self.p.epilogue
        residual = at.residual(k, *pixel) if epilogue.residual else f.residual
        value = finish(f, value, self.p, (f.bias, k), (residual, 0), count)
        self._mark(at, k, [pixel], [value], value)
        self._write(at.y(k, *pixel), value, count)

    def _pooled(self, at: _Tile, k: Index, count: int, window: list[tuple[Any, Any]],
                values: list[Vector]) -> None:
        """The largest of a window; its values are never written."""
        f, epilogue = at.f, self.p.epilogue
        if epilogue.residual:
            values = [value + at.residual(k, *pixel).load(count=count)
                      for value, pixel in zip(values, window, strict=True)]
        value = pool(values)  # adding the bias and cutting at zero keep the order
        if epilogue.bias:
            value = value + (f.bias + k).load(count=count)
        value = activate(f, value, epilogue)
        self._mark(at, k, window, values, value)
        top, left = window[0]
        self._write(at.y(k, top // 2, left // 2), value, count)

    def _mark(self, at: _Tile, k: Index, window: list[tuple[Any, Any]], values: list[Vector],
              value: Vector) -> None:
        """The bits of a window with this result, where a mask is asked for."""
        if self.p.epilogue.mask:
            found = passes(at.f, values, value, self.p.epilogue)
            for pixel, bits in zip(window, found, strict=True):
                at.mask(k, *pixel).store_bits(bits)

    def _write(self, to: Pointer, value: Vector, count: int) -> None:
        streaming = self.s.streaming and count == self.g.lanes
        to.store(value, count=count, streaming=streaming)


def _window(top: Any, left: Any) -> list[tuple[Any, Any]]:
    return [(top + a, left + b) for a in (0, 1) for b in (0, 1)]


class _Tile:
    """Addresses of the pixels of a tile; a row and a column are numbers or emitted values.

    Rows are added first: in a loop over channels each has one base, columns are constants to it.
    """

    def __init__(self, f: Function, geometry: Geometry) -> None:
        z = InCode(f, geometry, SIZES)
        self.f, self.k, self.lanes = f, geometry.p.k, geometry.lanes
        down, across = geometry.p.dilation
        self.down, self.across = down * self.k, across * geometry.y_step(z)
        self.conv_w, self.out_w = z.conv_w, z.out_w
        self.y_row = z.y_row * down if geometry.p.grid else None

    def y(self, k: Index, i: Any, j: Any) -> Pointer:
        return self.f.y + self._rows(self.out_w, i) + k + j * self.across

    def residual(self, k: Index, i: Any, j: Any) -> Pointer:
        return self.f.residual + self._rows(self.conv_w, i) + k + j * self.across

    def _rows(self, width: Index, i: Any) -> Index:
        return width * (i * self.down) if self.y_row is None else self.y_row * i

    def mask(self, k: Index, i: Any, j: Any) -> Pointer:
        row = self.f.mask.bytes(self.conv_w * (i * pixel_bytes(self.k, self.lanes)))
        return place(row, k, self.k, j)
