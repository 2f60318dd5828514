"""Which rows share a scale: `g_idx` -> groups that lie one after the other, and the order of rows that does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array, is_cupy
from ..errors import FormatError
from ..weights import GROUP_SIZES, group_count


@dataclass(frozen=True)
class Grouping:
    """How rows of a checkpoint become packed rows.

    Attributes
    ----------
    group_size : int
        Of the packed weight: 16, 32, 64, 128, 256, or -1.
    source : (groups,) int64
        The checkpoint's group whose scale each packed group takes.
    order : (K,) int64 or None
        Packed row i is row ``order[i]`` of the checkpoint; None where rows stay where they are.
    """

    group_size: int
    source: np.ndarray
    order: np.ndarray | None


def check_group_size(group_size: Any, k: int, groups: int) -> int:
    """Return the group size of a checkpoint (-1 for the whole column); None is read off the rows of scales."""
    if group_size is None:
        if groups == 1:
            return -1
        if groups < 1 or k % groups:
            raise FormatError(f"group_size must be given: K={k} rows do not divide into the {groups} groups of scales")
        return k // groups
    if (
        isinstance(group_size, bool)
        or not isinstance(group_size, (int, np.integer))
        or not (group_size == -1 or group_size > 0)
    ):
        raise FormatError(f"group_size must be a positive integer, or -1 for the whole column, got {group_size!r}")
    return int(group_size)


def row_groups(g_idx: Array | None, k: int, group_size: int, groups: int) -> np.ndarray:
    """Return the group of each of K rows, (K,) int64, checked against the number of rows of scales.

    `g_idx` None, empty or all -1 stands for rows in plain order.
    """
    indices = None
    if g_idx is not None and g_idx.size:
        indices = np.asarray(g_idx.get() if is_cupy(g_idx) else g_idx)
        if indices.dtype.kind not in "iu" or indices.shape != (k,):
            raise FormatError(f"g_idx must hold {k} integers, one a row, got {indices.dtype} of shape {indices.shape}")
        indices = indices.astype(np.int64)
        if (indices == -1).all():
            indices = None
    if indices is None:
        wanted = group_count(k, group_size)
        if groups != wanted:
            raise FormatError(
                f"scales must have {wanted} rows, one a group of {k if group_size == -1 else group_size} of K={k}, "
                f"got {groups}; a slice of K that keeps the scales of the whole weight needs its part of g_idx"
            )
        return np.zeros(k, np.int64) if group_size == -1 else np.arange(k) // group_size
    wrong = (indices < 0) | (indices >= groups)
    if wrong.any():
        row = int(wrong.argmax())
        raise FormatError(f"g_idx must lie in 0..{groups - 1}, the rows of scales, got {indices[row]} for row {row}")
    return indices


def regroup(rows: np.ndarray, group_size: int) -> Grouping:
    """Return the largest groups that hold the same rows for each scale.

    Groups of the packed layout have one size, but for the last one. A checkpoint's group may span several of them, so
    any size fits that is a multiple of a packed one; a slice of K may cut its first and last groups.
    """
    k = len(rows)
    counts = np.bincount(rows)
    present = np.flatnonzero(counts)
    plain = bool((rows[1:] >= rows[:-1]).all())
    sizes = [group_size] if group_size in GROUP_SIZES else []
    if len(present) == 1:
        sizes.append(-1)
    sizes += sorted(GROUP_SIZES, reverse=True)
    for move in (False, True) if plain else (True,):  # rows that need not move are read faster
        for size in sizes:
            step = k if size == -1 else size
            ragged = present[counts[present] % step != 0]
            if len(ragged) > 1 or (len(ragged) and not move and ragged[0] != present[-1]):
                continue
            sequence = np.concatenate([present[~np.isin(present, ragged)], ragged])
            source = np.repeat(sequence, -(-counts[sequence] // step))
            rank = np.zeros(len(counts), np.int64)
            rank[sequence] = np.arange(len(sequence))
            order = np.argsort(rank[rows], kind="stable")
            return Grouping(size, source, None if (order == np.arange(k)).all() else order)
    odd = present[counts[present] % GROUP_SIZES[0] != 0]
    raise FormatError(
        f"groups must have a multiple of {GROUP_SIZES[0]} rows, all but one of them, got {counts[odd[0]]} rows in "
        f"group {odd[0]} and {counts[odd[1]]} in group {odd[1]}; convert the whole weight, or slice K at other rows"
    )
