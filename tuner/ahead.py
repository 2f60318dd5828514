"""Compiling ahead, in processes of its own, so that the GPU never waits for NVRTC.

Results reach the measuring process through the compiler's cache on disk. Whatever goes wrong here goes wrong again, and
is then recorded, where the kernel is asked for; so nothing is reported from here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from cupyq.errors import CupyqError
from cupyq.kernels import Config, Problem

from .candidate import Candidate, source_hash


class Ahead:
    """A pool of compiling processes for one architecture; starts with the first kernel it is given.

    Parameters
    ----------
    arch : str
        "sm_80", ...
    processes : int, optional
        All CPUs but one by default, eight at most.
    """

    def __init__(self, arch: str, processes: int | None = None) -> None:
        self.arch = arch
        self.processes = processes or max(1, min(8, (os.cpu_count() or 2) - 1))
        self._pool: ProcessPoolExecutor | None = None
        self._given: dict[str | None, Future[bool]] = {}

    def submit(self, candidates: Iterable[Candidate], problem: Problem) -> int:
        """Have the candidates' kernels compiled, each source once; return how many were new."""
        fresh = 0
        for candidate in candidates:
            key = source_hash(candidate, problem)
            if candidate.config is None or key in self._given:
                continue
            try:
                self._given[key] = self._started().submit(_compile, candidate.config, problem, self.arch)
            except (BrokenProcessPool, RuntimeError):  # the pool is gone: kernels are compiled where they are needed
                return fresh
            fresh += 1
        return fresh

    def wait(self, seconds: float | None = None) -> int:
        """Wait for what was submitted; return how many kernels compiled."""
        done = 0
        for future in self._given.values():
            with contextlib.suppress(BrokenProcessPool, TimeoutError):
                done += future.result(seconds)
        return done

    def close(self) -> None:
        """End the processes; what has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context: Any = multiprocessing.get_context("spawn")  # the parent may have threads
            self._pool = ProcessPoolExecutor(self.processes, context, initializer=_quietly)
        return self._pool


def _quietly() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent


def _compile(cfg: Config, problem: Problem, arch: str) -> bool:
    from cupyq import compiler

    try:
        compiler.compile_kernel(cfg, problem, arch)
    except CupyqError:
        return False
    return True
