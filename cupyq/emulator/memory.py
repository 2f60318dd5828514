"""Global, shared and local memory, with the checks of bounds, alignment, freed ranges and uninitialized bytes.

Every allocation has 64 GiB of address space of its own, so an address that leaves its array cannot land in another one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cupyq.errors import ArgumentError

from .faults import EmulatorFault
from .syntax import Ins

REGION_BITS = 36
SHARED_ID, LOCAL_ID = 1 << 16, 1 << 17
SHARED_WINDOW, LOCAL_WINDOW = SHARED_ID << REGION_BITS, LOCAL_ID << REGION_BITS
CLUSTER_SHIFT = 24  # a shared::cluster address holds the rank of its CTA, plus one, from this bit on
# One element of this dtype is one access of so many bytes: a gather then copies whole accesses.
CELL = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
    32: np.dtype("V32"),
}
WRITTEN, IN_FLIGHT = 1, 2
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}


def window_of(address: Any, want: str) -> np.ndarray:
    """Which generic addresses lie in the window of a space."""
    region = np.asarray(address) >> np.uint64(REGION_BITS)
    if want == "shared":
        return region == SHARED_ID
    if want == "local":
        return region == LOCAL_ID
    return (region != SHARED_ID) & (region != LOCAL_ID)


class Allocation:
    """One range of device memory: `buffer` holds its bytes, `start` is the address of the first."""

    def __init__(self, start: int, buffer: np.ndarray, label: str, writable: bool, argument: int | None = None) -> None:
        self.start, self.buffer, self.label, self.writable, self.argument = start, buffer, label, writable, argument
        self.size = buffer.size
        self.end = start + self.size
        self.freed = False
        self.shadow: Any = None  # the race checker's record of this allocation
        self.sectors = np.zeros((self.size + (start & 31) + 31) // 32 + 1, bool)
        self._views: dict[int, tuple[np.ndarray, int]] = {}

    def view(self, size: int) -> tuple[np.ndarray, int]:
        """The bytes as cells of `size` bytes, and the address of cell 0."""
        found = self._views.get(size)
        if found is None:
            skip = -self.start % size
            count = max(self.size - skip, 0) // size
            found = self._views[size] = (self.buffer[skip : skip + count * size].view(CELL[size]), self.start + skip)
        return found


class DeviceMemory:
    """All allocations of a launch, found by the top bits of an address."""

    def __init__(self) -> None:
        self.regions: dict[int, Allocation] = {}
        self._next = 1

    def add(
        self, buffer: np.ndarray, label: str, writable: bool = True, argument: int | None = None, skew: int = 0
    ) -> Allocation:
        """Place `buffer`; `skew` is its distance from a 256-byte boundary, as in the array it is a view of."""
        start = (self._next << REGION_BITS) + 256 + skew
        allocation = Allocation(start, buffer, label, writable, argument)
        self.regions[self._next] = allocation
        self._next += 1
        return allocation

    def nearest(self, address: int) -> Allocation | None:
        region = address >> REGION_BITS
        found = self.regions.get(region)
        if found is None and region + 1 in self.regions and address >= self.regions[region + 1].start - (1 << 32):
            found = self.regions[region + 1]
        return found

    def describe(self, address: int) -> tuple[str, int | None]:
        """An address in words, relative to the argument it belongs to."""
        found = self.nearest(address)
        if found is None:
            return f"address {address:#x} belongs to no argument", None
        offset = address - found.start
        if offset < 0:
            place = f"{-offset} bytes before the start of {found.label}"
        elif offset >= found.size:
            past = offset - found.size
            place = f"{past} bytes past the end of {found.label}" if past else f"just past the end of {found.label}"
        else:
            place = f"byte {offset} of {found.label}"
        return f"address {address:#x} is {place} ({found.size} bytes)", found.argument

    def split(self, address: np.ndarray) -> list[tuple[Allocation | None, Any]]:
        """Group flat addresses by allocation: [(allocation, selection)], selection None for all."""
        region = address >> np.uint64(REGION_BITS)
        first = region[0]
        if (region == first).all():
            return [(self.regions.get(int(first)), None)]
        return [(self.regions.get(int(r)), np.nonzero(region == r)[0]) for r in np.unique(region)]


def array_extent(array: np.ndarray) -> tuple[int, int]:
    """Addresses of the first byte and after the last byte that the array's elements occupy."""
    low = high = array.__array_interface__["data"][0]
    if array.size:
        for extent, stride in zip(array.shape, array.strides, strict=True):
            if stride > 0:
                high += (extent - 1) * stride
            else:
                low += (extent - 1) * stride
        high += array.itemsize
    return low, high


def raw_bytes(low: int, high: int, keep: Any) -> np.ndarray:
    """The bytes of a range of host memory as an array that keeps their owner alive."""
    if high <= low:
        return np.empty(0, np.uint8)
    block = (ctypes.c_uint8 * (high - low)).from_address(low)
    block._owner = keep  # type: ignore[attr-defined]
    return np.frombuffer(block, np.uint8)


def place_arrays(memory: DeviceMemory, arrays: list[tuple[int, np.ndarray]]) -> dict[int, int]:
    """Give every array argument an address; arrays that overlap on the host overlap on the device too."""
    spans = []
    for index, array in arrays:
        if array.dtype.hasobject:
            raise ArgumentError(f"args[{index}]: an array of Python objects has no device form")
        low, high = array_extent(array)
        spans.append((low, high, index, array))
    spans.sort(key=lambda s: (s[0], s[1]))
    addresses: dict[int, int] = {}
    group: list = []
    top = 0

    def flush() -> None:
        if not group:
            return
        low = group[0][0]
        arrays_here = [s[3] for s in group]
        buffer = raw_bytes(low, top, arrays_here)
        owner = group[0][3]
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        skew = (low - owner.__array_interface__["data"][0]) % 256
        names = " and ".join(
            f"argument {s[2]} ({s[3].dtype}{list(s[3].shape)})" for s in sorted(group, key=lambda s: s[2])
        )
        writable = any(a.flags.writeable for a in arrays_here)
        placed = memory.add(buffer, names, writable, min(s[2] for s in group), skew)
        for s_low, _, index, _ in group:
            addresses[index] = placed.start + (s_low - low)

    for span in spans:
        if group and span[0] >= top:
            flush()
            group, top = [], 0
        group.append(span)
        top = max(top, span[1])
    flush()
    return addresses


class SharedMemory:
    """The shared memory of every resident CTA, one after another, with a shadow byte for each byte."""

    def __init__(self, ctas: int, start: int, end: int, check_init: bool) -> None:
        self.start, self.end = start, end
        self.stride = max(-(-end // 1024) * 1024, 1024)
        self.data = np.zeros(ctas * self.stride, np.uint8)
        self.shadow = np.zeros(ctas * self.stride, np.uint8) if check_init else None
        self.cells = {size: self.data.view(CELL[size]) for size in CELL}
        # Shadow cells are compared with a constant, so those of 16 bytes are seen as pairs of 8.
        self.marks = {size: self.shadow.view(CELL[size]) for size in CELL} if self.shadow is not None else None


class LocalMemory:
    """The local memory of every thread, thread by thread."""

    def __init__(self, threads: int, frame: int, check_init: bool) -> None:
        self.frame = -(-frame // 32) * 32
        self.end = frame
        self.data = np.zeros(threads * self.frame, np.uint8)
        self.shadow = np.zeros(threads * self.frame, np.uint8) if check_init else None
        self.cells = {size: self.data.view(CELL[size]) for size in CELL}
        self.marks = {size: self.shadow.view(CELL[size]) for size in CELL} if self.shadow is not None else None


def gather(cells: np.ndarray, index: np.ndarray) -> np.ndarray:
    return cells.take(index)


def all_bytes(cells: np.ndarray, value: int) -> np.ndarray:
    """For each cell, whether all its bytes equal `value`."""
    size = cells.dtype.itemsize
    if size <= 8:
        return cells == cells.dtype.type(int.from_bytes(bytes([value]) * size, "little"))
    return (cells.view(np.uint64).reshape(-1, size // 8) == np.uint64(0x0101010101010101 * value)).all(1)


def misaligned(address: np.ndarray, size: int) -> bool:
    return bool(int(np.bitwise_or.reduce(address)) & (size - 1))


def first_lane(g: Any, active: np.ndarray | None, flat: int) -> tuple[int, int]:
    """Warp (index in the wave) and lane of the flat index into the active threads."""
    if active is not None:
        rows, lanes = np.nonzero(active)
        row, lane = int(rows[flat]), int(lanes[flat])
    else:
        row, lane = divmod(flat, 32)
    return int(g.warps[row]), lane


def fault(
    g: Any,
    ins: Ins,
    kind: str,
    message: str,
    active: np.ndarray | None,
    flat: int,
    address: int | None = None,
    argument: int | None = None,
) -> EmulatorFault:
    """A fault of the thread at flat index `flat` among the active ones."""
    warp, lane = first_lane(g, active, flat)
    return g.m.fault(kind, message, ins, warp, lane, address, argument)


def check_global(
    g: Any, ins: Ins, address: np.ndarray, size: int, active: np.ndarray | None, write: bool
) -> list[tuple[Allocation, Any]]:
    """Find the allocations of flat addresses; a fault if one is out of bounds, misaligned, freed or read-only."""
    m = g.m
    verb = "write" if write else "read"
    if misaligned(address, size):
        at = int(np.argmax(address & np.uint64(size - 1) != 0))
        words, argument = m.memory.describe(int(address[at]))
        raise fault(
            g, ins, "memory", f"misaligned {verb} of {size} bytes: {words}", active, at, int(address[at]), argument
        )
    parts = m.memory.split(address)
    for allocation, selection in parts:
        chosen = address if selection is None else address[selection]
        if allocation is None:
            bad = np.zeros(1, int)
        else:
            low, high = int(chosen.min()), int(chosen.max())
            if (
                low >= allocation.start
                and high + size <= allocation.end
                and not allocation.freed
                and (allocation.writable or not write)
            ):
                continue
            if allocation.freed or (
                write and not allocation.writable and low >= allocation.start and high + size <= allocation.end
            ):
                bad = np.zeros(1, int)
            else:
                bad = np.nonzero(
                    (chosen < np.uint64(allocation.start)) | (chosen + np.uint64(size) > np.uint64(allocation.end))
                )[0]
        at = int(bad[0])
        value = int(chosen[at])
        flat = at if selection is None else int(selection[at])
        words, argument = m.memory.describe(value)
        if allocation is not None and allocation.freed:
            what = f"{verb} of {size} bytes in freed memory"
        elif allocation is not None and value >= allocation.start and value + size <= allocation.end:
            what = f"{verb} of {size} bytes in a read-only array"
        else:
            what = f"{verb} of {size} bytes out of bounds"
        raise fault(g, ins, "memory", f"{what}: {words}", active, flat, value, argument)
    return parts  # type: ignore[return-value]


def shared_index(
    g: Any, ins: Ins, address: np.ndarray, active: np.ndarray | None, size: int, write: bool
) -> np.ndarray:
    """Flat byte positions in the wave's shared memory, checked; `address` is flat over the active threads."""
    m = g.m
    shared = m.shared
    verb = "write" if write else "read"
    base = g.shared_base(active)
    where = address.astype(np.int64)
    if where.max() >= 1 << CLUSTER_SHIFT:
        rank = (where >> CLUSTER_SHIFT) - 1
        remote = rank >= 0
        if (m.cluster_size == 1 and (rank > 0).any()) or (rank >= m.cluster_size).any():
            at = int(np.argmax(rank >= m.cluster_size))
            raise fault(
                g,
                ins,
                "memory",
                f"{verb} of {size} bytes at shared address {int(address[at]):#x}, outside the cluster",
                active,
                at,
                int(address[at]),
            )
        warps = g.flat_warps(active)
        cta = m.cta_of_warp[warps]
        target = cta // m.cluster_size * m.cluster_size + rank
        base = np.where(remote, target * shared.stride, base)
        where = where & ((1 << CLUSTER_SHIFT) - 1)
    if where.min() < shared.start or where.max() + size > shared.end:
        at = int(np.argmax((where < shared.start) | (where + size > shared.end)))
        raise fault(
            g, ins, "memory",
            f"{verb} of {size} bytes out of bounds: shared address {int(where[at])} where "
            f"{shared.end - shared.start} bytes from {shared.start} exist",
            active, at, int(where[at]),
        )  # fmt: skip
    if misaligned(where, size):
        at = int(np.argmax(where & (size - 1) != 0))
        raise fault(
            g,
            ins,
            "memory",
            f"misaligned {verb} of {size} bytes at shared address {int(where[at])}",
            active,
            at,
            int(where[at]),
        )
    return where + base


def local_index(g: Any, ins: Ins, address: np.ndarray, active: np.ndarray | None, size: int, write: bool) -> np.ndarray:
    """Flat byte positions in the wave's local memory, checked."""
    m = g.m
    verb = "write" if write else "read"
    where = address.astype(np.int64)
    if where.min() < 0 or where.max() + size > m.local.end:
        at = int(np.argmax((where < 0) | (where + size > m.local.end)))
        raise fault(
            g,
            ins,
            "memory",
            f"{verb} of {size} bytes out of bounds: local address {int(where[at])} of {m.local.end} bytes",
            active,
            at,
            int(where[at]),
        )
    if misaligned(where, size):
        at = int(np.argmax(where & (size - 1) != 0))
        raise fault(
            g,
            ins,
            "memory",
            f"misaligned {verb} of {size} bytes at local address {int(where[at])}",
            active,
            at,
            int(where[at]),
        )
    return where + g.flat_threads(active) * m.local.frame


def check_written(
    g: Any, ins: Ins, space: Any, name: str, position: np.ndarray, size: int, active: np.ndarray | None, base: int
) -> None:
    """The init check: every byte about to be read must have been written, and not be on its way."""
    marks = space.marks[size].take(position >> SHIFT[size])
    good = all_bytes(marks, WRITTEN)
    if good.all():
        return
    at = int(np.argmin(good))
    bytes_ = np.atleast_1d(marks[at : at + 1]).view(np.uint8)
    where = int(position[at]) % base
    if (bytes_ >= IN_FLIGHT).any():
        what = f"{name} address {where} is read while an asynchronous copy to it has not been waited for"
    else:
        what = f"{name} address {where} is read before anything is written there"
    raise fault(g, ins, "init", what, active, at, where)
