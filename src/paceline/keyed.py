"""Random numbers that are looked up, not drawn: every number is a pure function of a key, a position and an index.

The generator is Philox-4x32 with ten rounds (Salmon et al., 2011). It is written once, in 64-bit integer arithmetic
that is exact in NumPy, torch on the CPU and torch on CUDA, so all three give the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.machine import usable_cores

if TYPE_CHECKING:
    from torch import Tensor

    Integers = TypeVar("Integers", NDArray[np.int64], Tensor)
else:
    Integers = TypeVar("Integers")

Numbers = TypeVar("Numbers", NDArray[np.float64], NDArray[np.uint32])
Words = tuple[Integers, Integers, Integers, Integers]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BLOCK = 1 << 17
"""How many numbers are made at a time, a multiple of 4: few enough that they stay in the processor's cache through many
passes, and enough that threads seldom wait for Python's lock between two passes."""
_THREADS = 8
"""At most so many threads make blocks: NumPy lets them run side by side, but for the moments between its passes."""
_BLOCKS_EACH = 2
"""With fewer blocks for each, starting threads takes longer than it spares."""


def key(seed: int, purpose: str, *names: str | int) -> int:
    """The 64-bit key of one use of random numbers, such as key(seed, "augment") or key(seed, "weights", name)."""
    text = "\x1f".join([str(seed), purpose, *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def words(key: int, position: Integers, index: int | Integers = 0) -> Words[Integers]:
    """Four independent 32-bit words for each position and index (int64 arrays or tensors that broadcast)."""
    zero = position * 0 + index * 0
    a, b = zero + (position & _LOW), zero + ((position >> 32) & _LOW)
    c, d = zero + (index & _LOW), zero + ((index >> 32) & _LOW)
    k0, k1 = key & _LOW, key >> 32
    for _ in range(_ROUNDS):
        # The product of two 32-bit numbers fits 64 bits; int64 wraps, and shift-and-mask recovers the unsigned halves.
        # Everything is done in place, for memory of its own takes longer than the arithmetic.
        a *= _MULTIPLIERS[0]
        c *= _MULTIPLIERS[1]
        p, q = a >> 32, c >> 32
        p &= _LOW
        q &= _LOW
        p ^= d
        q ^= b
        p ^= k1
        q ^= k0
        a &= _LOW
        c &= _LOW
        a, b, c, d = q, c, p, a
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return a, b, c, d


def integers(word: Integers, bound: int) -> Integers:
    """Whole numbers from 0 up to but not including `bound` (below 2^31), one for each word."""
    return (word * bound) >> 32


def uniforms(high: Any, low: Any) -> Any:
    """Float64 numbers in [0, 1) with 53 random bits, from two words each; arrays give arrays, tensors give tensors."""
    whole = (high >> 5) * (1 << 26) + (low >> 6)
    return (whole.astype(np.float64) if isinstance(whole, np.ndarray) else whole.double()) * 2.0**-53


def host_uniforms(key: int, count: int) -> NDArray[np.float64]:
    """`count` uniforms in [0, 1) for a key, computed on the host."""
    return _in_blocks(np.empty(count), lambda start, end: _uniforms(key, start, end))


def host_words(key: int, count: int) -> NDArray[np.uint32]:
    """`count` random 32-bit words for a key, computed on the host."""

    def make(start: int, end: int) -> NDArray[np.int64]:
        fours = words(key, np.arange(start // 4, (end + 3) // 4, dtype=np.int64))
        return np.stack(fours, axis=1).reshape(-1)[: end - start]

    return _in_blocks(np.empty(count, np.uint32), make)


def _uniforms(key: int, start: int, end: int) -> NDArray[np.float64]:
    """The uniforms for a key from number `start`, which is even, up to but not including `end`."""
    a, b, c, d = words(key, np.arange(start // 2, (end + 1) // 2, dtype=np.int64))
    fractions = np.empty(2 * len(a))
    fractions[::2], fractions[1::2] = uniforms(a, b), uniforms(c, d)
    return fractions[: end - start]


def _in_blocks(numbers: Numbers, make: Callable[[int, int], NDArray[Any]]) -> Numbers:
    """Fill an array with blocks, each made from its first number to its end, on several threads if there are many."""
    count = len(numbers)
    starts = range(0, count, _BLOCK)

    def fill(start: int) -> None:
        end = min(start + _BLOCK, count)
        numbers[start:end] = make(start, end)

    threads = min(_THREADS, len(starts) // _BLOCKS_EACH)
    if threads > 1:
        threads = min(threads, usable_cores())
    if threads < 2:
        for start in starts:
            fill(start)
        return numbers
    pool = ThreadPoolExecutor(threads, "keyed")
    try:
        for _ in pool.map(fill, starts):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # or Ctrl-C would wait for millions of numbers
    return numbers


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """A permutation of 0 .. count-1 that depends on the key alone."""
    a, b, c, d = words(key, np.arange((count + 1) // 2, dtype=np.int64))
    rank = np.stack([(a << 32) | b, (c << 32) | d], axis=1).reshape(-1)[:count]
    return np.argsort(rank, kind="stable").astype(np.int64)


def normals(key: int, count: int, limit: float | None = None) -> NDArray[np.float64]:
    """`count` standard normal numbers, truncated to +-`limit` if there is one; the same bits on every host."""
    tail = 0.0 if limit is None else _normal_tail(limit)

    def make(start: int, end: int) -> NDArray[np.float64]:
        return _normal_quantiles(tail + (1 - 2 * tail) * _inside(_uniforms(key, start, end)))

    return _in_blocks(np.empty(count), make)


def normals_of(high: NDArray[np.int64], low: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard normal numbers from two words each, computed on the host."""
    return _normal_quantiles(_inside(uniforms(high, low)))


def _inside(fraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """The fraction, but never 0 or 1, at which the normal quantile is infinite."""
    inside: NDArray[np.float64] = np.minimum(fraction + 2.0**-54, 1 - 2.0**-53)
    return inside


def normal_quantiles(count: int) -> NDArray[np.float64]:
    """The middles of `count` equally likely slices of the normal distribution."""
    return _normal_quantiles((np.arange(count) + 0.5) / count)


def _normal_quantiles(fraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of the normal distribution by Wichura's rational approximations (AS 241, good to 1e-16).

    Only exact IEEE operations are used: NumPy's own log differs in the last bit between processors.
    """
    from_middle = fraction - 0.5
    central = np.abs(from_middle) <= 0.425
    squared = 0.180625 - from_middle * from_middle
    quantiles = from_middle * _polynomial(_MIDDLE[0], squared) / _polynomial(_MIDDLE[1], squared)
    outside = ~central  # few, and the tails are computed for them alone
    tail = fraction[outside]
    r = np.sqrt(-_log(np.minimum(tail, 1 - tail)))
    outer = _polynomial(_NEAR[0], r - 1.6) / _polynomial(_NEAR[1], r - 1.6)
    far = r > 5.0
    outer[far] = _polynomial(_FAR[0], r[far] - 5.0) / _polynomial(_FAR[1], r[far] - 5.0)
    quantiles[outside] = np.copysign(outer, from_middle[outside])
    return quantiles


def _normal_tail(limit: float) -> float:
    """The fraction of a normal distribution below -limit."""
    return math.erfc(limit / math.sqrt(2)) / 2


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm from exact operations: exponent apart, then the series of atanh."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752
    mantissa = np.where(small, 2 * mantissa, mantissa)
    z = (mantissa - 1) / (mantissa + 1)
    series = _polynomial([1 / k for k in range(1, 26, 2)], z * z)
    result: NDArray[np.float64] = (exponent - small) * 0.69314718055994531 + 2 * z * series
    return result


def _polynomial(coefficients: list[float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Horner's rule, lowest coefficient first."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value *= x
        value += coefficient
    return value


# Numerator and denominator of AS 241 near the middle, in the tails, and far out.
_MIDDLE = (
    [
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ],
    [
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ],
)
_NEAR = (
    [
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ],
    [
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ],
)
_FAR = (
    [
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ],
    [
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ],
)
