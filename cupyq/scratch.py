"""Scratch memory that launches share: split-K sums, codes of activations, gathered columns of x."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np

from .arrays import Array

_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, another stream in each thread
_CACHED_VIEWS = 1024  # of scratch buffers: stream x name x shape


class Scratch:
    """Device memory that launches of one stream use one after the other: split-K partial sums, activation codes.

    A stream runs its kernels in order, so one buffer of each name serves them all; two streams never share. Buffers
    grow and stay. While a stream is being captured every launch gets memory of its own, which is kept for good: the
    graph may be replayed at any time, on any stream, beside others.

    Attributes
    ----------
    order : lock
        Held by a thread from the launch that writes a buffer to the last one that reads it: several threads may launch
        on one stream, and what they launch is in order only within each.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Array] = {}
        self._views: dict[tuple[Any, ...], Array] = {}
        self._workspaces: dict[tuple[int, ...], tuple[Array, Array]] = {}
        self._captured: list[Any] = []
        self._streams: dict[tuple[int, ...], Any] = {}  # alive as long as their memory: a handle is used again
        self._lock = threading.Lock()
        self.order = threading.RLock()

    def get(self, name: str, shape: tuple[int, ...], dtype: Any, zero: bool = False) -> Array:
        """Return a buffer of this shape for the current device and stream.

        Parameters
        ----------
        name : str
            What it is for; buffers of different names do not overlap.
        shape, dtype
            Of the array returned. A larger buffer of the same name and dtype serves smaller shapes.
        zero : bool
            Zeros when it is made; launches leave it as zeros.
        """
        place = self.place()
        if place is None:
            return self._kept(shape, dtype, zero)
        key = (place, name, shape, dtype)
        view = self._views.get(key)
        if view is None:
            size = math.prod(shape)
            view = self._buffer((*place, name, np.dtype(dtype)), size, dtype, zero)[:size].reshape(shape)
            with self._lock:
                self._streams[place] = sys.modules["cupy"].cuda.get_current_stream()
                if len(self._views) >= _CACHED_VIEWS:
                    self._views.clear()
                self._views[key] = view
        return view

    def workspace(self, partial_words: int, tiles: int) -> tuple[Array, Array]:
        """Return (partials, arrivals) of a launch that shares tiles among CTAs: uint32, of at least these sizes."""
        place = self.place()
        if place is None:
            return self._kept((partial_words,), np.uint32), self._kept((tiles,), np.uint32, zero=True)
        pair = self._workspaces.get(place)
        if pair is not None and pair[0].size >= partial_words and pair[1].size >= tiles:
            return pair
        had = (0, 0) if pair is None else (pair[0].size, pair[1].size)
        import cupy

        pair = cupy.empty((max(partial_words, had[0]),), np.uint32), cupy.zeros((max(tiles, had[1]),), np.uint32)
        with self._lock:
            self._workspaces[place] = pair
            self._streams[place] = cupy.cuda.get_current_stream()
        return pair

    def place(self) -> tuple[int, ...] | None:
        """Return what tells the current device and stream from any other, or None while the stream is captured."""
        cuda = sys.modules["cupy"].cuda  # an import statement would cost as much as all the rest
        stream = cuda.get_current_stream()
        handle = stream.ptr  # 0 and 1: the default stream, which cannot be captured, nor be asked during captures
        if handle > 1 and stream.is_capturing():
            return None
        device = cuda.runtime.getDevice()
        return (device, handle, threading.get_ident()) if handle == _PER_THREAD_STREAM else (device, handle)

    def _buffer(self, key: tuple[Any, ...], size: int, dtype: Any, zero: bool = False) -> Array:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            import cupy

            with self._lock:
                self._buffers[key] = buffer = (cupy.zeros if zero else cupy.empty)((size,), dtype)
                self._views.clear()  # some are of the smaller buffer, which would stay alive beside this one
        return buffer

    def _kept(self, shape: tuple[int, ...], dtype: Any, zero: bool = False) -> Array:
        import cupy

        fresh = (cupy.zeros if zero else cupy.empty)(shape, dtype)
        self._captured.append(fresh)
        return fresh

    def capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        stream = sys.modules["cupy"].cuda.get_current_stream()
        return stream.ptr > 1 and stream.is_capturing()

    def keep(self, *arrays: Any) -> None:
        """Keep temporary arrays for good if the current stream is being captured: the graph holds their addresses."""
        if self.capturing():
            self._captured.extend(arrays)

    def clear(self) -> None:
        """Give up every buffer, those of captured graphs excepted."""
        with self._lock:
            self._buffers.clear()
            self._views.clear()
            self._workspaces.clear()
            self._streams.clear()


scratch = Scratch()
