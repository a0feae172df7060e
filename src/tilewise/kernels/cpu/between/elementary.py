"""exp, tanh and what is made of them, on vectors.

Errors are stated in units of the last place of the result, and tests look at all exponents. NaN
stays NaN. docs/numerics.md has the derivations; scripts/fit_elementary.py made the coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..emit import Function, Vector

LOG2_E = 1.44269504
# ln 2 in two parts: multiples of the first by whole numbers up to 128 are exact
LN2, LN2_REST = 0.693359375, -2.12194440e-4
ROUNDER = 12582912.0  # 1.5 * 2**23: a float plus it has its whole part in the last bits
LOWEST, HIGHEST = -87.5, 89.0  # beyond, exp is zero or infinite
EXP = (0.49999994, 0.166665152, 0.041668456, 0.00836941879, 0.00138131448)
TANH = (-0.333332777, 0.133313313, -0.0537300073, 0.0206061769, -0.00566697679)
ERFC = (3.90855212e-06, 0.281964928, 0.283949256, 0.231854841, 0.252053142, -0.166339189,
        0.537641883, -0.801385701, 0.522805929, -0.161702245, 0.0191532504)
TANH_NEAR = 0.625  # where one minus something small would lose digits
EXPM1_NEAR = 0.34
HALF_ROOT = 0.707106781
GELU_SLOPE, GELU_CUBIC = 1.59576912, 0.0713548163  # 2 sqrt(2 / pi), and that times .044715


def exp(f: Function, x: Vector) -> Vector:
    """Within 2 units; zero where the result would be denormal."""
    bounded = _const(f, x, HIGHEST).minimum(_const(f, x, LOWEST).maximum(x))
    shifted = f.fma(bounded, _const(f, x, LOG2_E), _const(f, x, ROUNDER))
    whole = shifted - _const(f, x, ROUNDER)
    rest = f.fma(whole, _const(f, x, -LN2_REST), f.fma(whole, _const(f, x, -LN2), bounded))
    # half of the power is always a number; twice it may be infinite
    return _near_one(f, rest) * shifted.half_power_of_two() * _const(f, x, 2.0)


def _near_one(f: Function, rest: Vector) -> Vector:
    return _const(f, rest, 1.0) + _behind_one(f, rest)


def _behind_one(f: Function, rest: Vector) -> Vector:
    """exp(rest) - 1 for a small rest."""
    return f.fma(rest * rest, _polynomial(f, rest, EXP), rest)


def expm1(f: Function, x: Vector) -> Vector:
    """exp(x) - 1, within 4 units."""
    near = _const(f, x, EXPM1_NEAR).above(x.absolute())
    return near.select(_behind_one(f, x), exp(f, x) - _const(f, x, 1.0))


def sigmoid(f: Function, x: Vector) -> Vector:
    """Within 3 units."""
    one = _const(f, x, 1.0)
    return one / (one + exp(f, -x))


def tanh(f: Function, x: Vector) -> Vector:
    """Within 4 units."""
    size, one = x.absolute(), _const(f, x, 1.0)
    square = x * x
    near = f.fma(x * square, _polynomial(f, square, TANH), x)
    far = one - _const(f, x, 2.0) / (exp(f, size + size) + one)
    return _const(f, x, TANH_NEAR).above(size).select(near, far.with_sign_of(x))


def silu(f: Function, x: Vector) -> Vector:
    return x / (_const(f, x, 1.0) + exp(f, -x))


def gelu(f: Function, x: Vector) -> Vector:
    """x times the share of the normal distribution below it."""
    one, half = _const(f, x, 1.0), _const(f, x, 0.5)
    z = x.absolute() * _const(f, x, HALF_ROOT)
    t = one / f.fma(z, half, one)
    beyond = half * exp(f, -(z * z)) * _polynomial(f, t, ERFC)
    return x * x.above(_const(f, x, 0.0)).select(one - beyond, beyond)


def gelu_tanh(f: Function, x: Vector) -> Vector:
    """torch's approximate="tanh": x times a sigmoid of a cubic polynomial."""
    inner = f.fma(x * x * x, _const(f, x, GELU_CUBIC), x * _const(f, x, GELU_SLOPE))
    return x * sigmoid(f, inner)


def mish(f: Function, x: Vector) -> Vector:
    """x tanh(log(1 + exp(x))), the logarithm resolved."""
    grown = exp(f, _const(f, x, 20.0).minimum(x))
    part = grown * (grown + _const(f, x, 2.0))
    return x * (part / (part + _const(f, x, 2.0)))


def _polynomial(f: Function, x: Vector, coefficients: Sequence[float]) -> Vector:
    """The lowest power first."""
    found = _const(f, x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        found = f.fma(found, x, _const(f, x, coefficient))
    return found


def _const(f: Function, like: Vector, value: float) -> Vector:
    return f.vector(value, like.lanes)
