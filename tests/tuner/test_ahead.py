"""Compiling ahead: each source once, in other processes, found again through the cache on disk."""

from __future__ import annotations

import dataclasses
import time

import pytest
from tuning_fakes import DEVICE, PROBLEM

from cupyq import kernels
from cupyq.compiler import cache, kernel
from cupyq.kernels import W4A16Config
from cupyq.tuner.ahead import Ahead
from cupyq.tuner.candidate import Candidate

CONFIG = W4A16Config(block_m=16, strips=1, warps_n=2, warps_k=1, stages=2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYQ_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_kernels_are_there_when_they_are_asked_for(folder, monkeypatch):
    two = [Candidate("fused", dataclasses.replace(CONFIG, stages=stages)) for stages in (2, 3)]
    same = Candidate("fused", dataclasses.replace(CONFIG, split_k=2))  # an argument of the launch, not of the source
    with Ahead(DEVICE.arch, processes=2) as ahead:
        assert ahead.submit([*two, same, Candidate("fp16")], PROBLEM) == 2
        assert ahead.submit(two, PROBLEM.with_m(64)) == 0
        assert ahead.wait(60) == 2
    monkeypatch.setattr(kernel.nvrtc, "compile_source", lambda *a: pytest.fail("compiled again"))
    kernel._compile.cache_clear()
    for candidate in two:
        assert kernel.compile_kernel(candidate.config, PROBLEM, DEVICE.arch).registers > 0
    kernel._compile.cache_clear()
    assert cache.folder() == folder


def test_what_cannot_be_compiled_is_left_to_whoever_asks(folder):
    illegal = Candidate("fused", dataclasses.replace(CONFIG, warps_n=8, warps_k=8))
    assert kernels.check(illegal.config, PROBLEM, DEVICE) is not None
    with Ahead(DEVICE.arch, processes=1) as ahead:
        ahead.submit([illegal], PROBLEM)
        assert ahead.wait(60) == 0


def test_nothing_is_started_before_there_is_something_to_do():
    ahead = Ahead(DEVICE.arch)
    assert ahead.wait() == 0
    assert ahead._pool is None
    ahead.close()


def test_closing_does_not_wait(folder):
    ahead = Ahead(DEVICE.arch, processes=1)
    ahead.submit([Candidate("fused", cfg) for cfg in list(kernels.configs(PROBLEM, DEVICE))[:400:8]], PROBLEM)
    started = time.monotonic()
    ahead.close()
    assert time.monotonic() - started < 2
