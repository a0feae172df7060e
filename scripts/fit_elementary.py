"""Coefficients of kernels/cpu/between/elementary.py: polynomials of least largest error.

    python scripts/fit_elementary.py

Lawson's iteration: least squares on many points, those that err most weighted up, again and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Curve = Callable[[np.ndarray], np.ndarray]


def fitted(goal: Curve, low: float, high: float, degree: int, weight: Curve,
           rounds: int = 300) -> tuple[list[float], float]:
    """Coefficients, the lowest power first, and the largest weighted error."""
    middle, half = (high + low) / 2, (high - low) / 2
    x = middle + half * np.cos(np.pi * (np.arange(2000) + 0.5) / 2000)
    y, w = goal(x), weight(x)
    powers = np.vander(x, degree + 1, increasing=True)
    shares = np.full_like(x, 1 / len(x))
    for _ in range(rounds):
        scale = w * np.sqrt(shares)
        found = np.linalg.lstsq(powers * scale[:, None], y * scale, rcond=None)[0]
        errors = np.abs((powers @ found - y) * w)
        shares = shares * errors
        shares /= shares.sum()
    return [float(np.float32(c)) for c in found], float(errors.max())


def _behind(x: np.ndarray) -> np.ndarray:
    """(exp(x) - 1 - x) / x^2, also near zero."""
    series = sum(x ** i / math.factorial(i + 2) for i in range(18))
    return np.asarray(series)


def _tanh_behind(square: np.ndarray) -> np.ndarray:
    """(tanh(x) - x) / x^3 as a function of x^2."""
    x = np.sqrt(square)
    return (np.tanh(x) - x) / (x * square)


def _scaled_erfc(t: np.ndarray) -> np.ndarray:
    """erfc(z) exp(z^2) for t = 1 / (1 + z / 2)."""
    z = 2 / t - 2
    return np.array([_erfcx(v) for v in z])


def _erfcx(z: float) -> float:
    if z < 5:
        return math.erfc(z) * math.exp(z * z)
    found = 0.0  # the continued fraction, from behind
    for i in range(60, 0, -1):
        found = i / 2 / (z + found)
    return 1 / (math.sqrt(math.pi) * (z + found))


def main() -> None:
    half = math.log(2) / 2 * 1.01
    fits = {"EXP": fitted(_behind, -half, half, 4, lambda x: x * x / np.exp(x)),
            "TANH": fitted(_tanh_behind, 1e-4, 0.63 ** 2, 4,
                           lambda s: s * np.sqrt(s) / np.tanh(np.sqrt(s))),
            "ERFC": fitted(_scaled_erfc, 0.13, 1.0, 10, lambda t: 1 / _scaled_erfc(t))}
    for name, (coefficients, error) in fits.items():
        print(f"{name} = ({', '.join(f'{c:.9g}' for c in coefficients)})  # errs by {error:.0e}")


if __name__ == "__main__":
    main()
