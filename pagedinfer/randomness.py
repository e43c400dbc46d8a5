"""Randomness as a function: the same numbers from the same (seed, number), whatever ran in between.

Counter based, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with the mixer of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

__all__ = ["mix", "scramble"]

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def scramble(z: int) -> int:
    """SplitMix64's mixer of one integer, of which the low 64 bits count: a one-to-one map of 64-bit integers."""
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def mix(seed: int, number: int) -> int:
    """The `number`-th 64-bit integer of the row that `seed` starts."""
    return scramble(seed + (number + 1) * _GOLDEN_GAMMA)
