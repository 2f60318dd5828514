"""Batch bands: the one rule that sorts M (tokens) for the tuner and the dispatcher alike.

A band holds every M above the end before it, up to and including its own end. It is tuned at its upper
end and checked at its lower end. The ends are 1, 2, 4, ..., 8192; everything above 8192 is one last band,
which is named by, and tuned at, `OPEN_END` = 16384.
"""

from __future__ import annotations

import operator

from cupyq.errors import ShapeError

LAST_CLOSED_END = 8192
OPEN_END = 2 * LAST_CLOSED_END

_ENDS = tuple(1 << i for i in range(OPEN_END.bit_length()))


def ends() -> tuple[int, ...]:
    """Return the upper end of every band, smallest first: 1, 2, 4, ..., 8192, 16384.

    The last one, `OPEN_END`, stands for every M above 8192; the others are exact limits.
    """
    return _ENDS


def of(m: int) -> int:
    """Return the end of the band that holds `m`.

    Parameters
    ----------
    m : int
        Tokens (rows of x), at least 1. NumPy integers are welcome.

    Returns
    -------
    int
        The smallest band end >= `m`, or `OPEN_END` when `m` is above 8192.

    Raises
    ------
    ShapeError
        If `m` is below 1 (an empty batch launches nothing and has no band) or no integer.
    """
    m = _integer("m", m)
    if m < 1:
        raise ShapeError(f"m is {m}; a band holds m >= 1 (m = 0 launches nothing)")
    return min(1 << (m - 1).bit_length(), OPEN_END)


def lower_end(band: int) -> int:
    """Return the smallest M of the band that ends at `band`: 1 for 1, 2 for 2, 3 for 4, 8193 for 16384.

    Raises
    ------
    ShapeError
        If `band` is not one of `ends()`.
    """
    band = _integer("band", band)
    if band not in _ENDS:
        raise ShapeError(f"band is {band}; the bands end at {', '.join(map(str, _ENDS))}")
    return band // 2 + 1


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ShapeError(f"{name} is {value!r}; an integer is accepted") from None
