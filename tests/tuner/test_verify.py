"""Verification: right kernels pass in the emulator, wrong ones fail with a reason, equal ones run once."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from cupyq import compiler, devices, kernels, reference
from cupyq.errors import ArgumentError, VerificationError
from cupyq.kernels import DequantConfig, Problem, W4A16Config
from cupyq.kernels.problem import OPS
from cupyq.tuner import verify
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.inputs import GUARD, adversarial, guarded, small_launch
from cupyq.tuner.verify import Verifier, verify_row

DEVICE = devices.get("rtx-4090")
PROBLEM = Problem("w4a16", 16, 384, 384)
CONFIG = W4A16Config(block_m=16, strips=1, warps_n=2, warps_k=1, stages=2, split_k=2)


def outputs(problem, cfg, inputs):
    """Compute what the launch means, by the reference."""
    if isinstance(cfg, DequantConfig):
        return reference.dequantize(inputs.qw, "float64")
    x, scale = (inputs.x, None) if inputs.codes is None else (inputs.codes, inputs.x_scale)
    return reference.matmul(x, inputs.qw, inputs.bias, x_scale=scale)


def verifier(change=None, seed=0):
    """Return a verifier whose launches give the reference's result, changed by `change(call)` afterwards."""

    def launch(cfg, problem, call, arch):
        inputs = adversarial(problem, seed)
        with np.errstate(over="ignore"):
            call.out[...] = outputs(problem, cfg, inputs).astype(call.out.dtype)
        if change is not None:
            change(call)

    return Verifier(DEVICE, seed, launch)


@pytest.mark.parametrize(
    ("op", "more"),
    [
        ("w4a16", {"symmetric": False, "group_size": 32}),
        ("w4a16", {"dtype": "bfloat16", "group_size": -1}),
        ("w4a16", {"n": 390, "k": 200}),
        ("w8a8-int8", {}),
        ("w8a8-fp8", {"dtype": "bfloat16"}),
        ("w8a8-fp8-block", {"n": 300}),
        ("w2a16", {"group_size": 64, "symmetric": False}),
        ("w8a16", {}),
    ],
)
def test_default_kernels_pass_in_the_emulator(op, more):
    fields = {"m": 16, "n": 384, "k": 384, **more}
    problem = Problem(op, **fields)
    found = Verifier(DEVICE).verify(Candidate("fused", kernels.default(problem, DEVICE)), problem)
    assert found.ok, found.reason
    assert 0 < found.error < 0.02
    assert found.how == "emulator"


@pytest.mark.parametrize("op", ["w8a8-int8", "w8a8-fp8"])
def test_a_kernel_that_quantizes_activations_passes_too(op):
    problem = Problem(op, 8, 384, 384)
    config = kernels.default(problem, DEVICE, fused=True)
    assert config.fused
    found = Verifier(DEVICE).verify(Candidate("fused", config), problem)
    assert found.ok, found.reason


def test_dequantizing_passes_in_the_emulator():
    found = Verifier(DEVICE).verify(Candidate("dequant", DequantConfig(4, 1)), PROBLEM)
    assert found.ok, found.reason
    assert found.error < 1e-3


def test_a_planted_mistake_is_found():
    """The real kernel with its dequantizing magic off by one: compiled, run in the emulator, rejected."""
    candidate = Candidate("fused", CONFIG)

    def launch(cfg, problem, call, arch):
        compiled = compiler.compile_kernel(cfg, problem, arch)
        wrong = re.sub(r"fma\.rn\.f16x2", "sub.f16x2", compiled.ptx, count=0)
        wrong = re.sub(r"(sub\.f16x2\s+\S+,\s*\S+,\s*\S+?),[^;]*;", r"\1;", wrong)
        from cupyq import emulator

        emulator.launch(wrong, compiled.entry, call.grid, call.block, call.args, call.shared_bytes)

    found = Verifier(DEVICE, launch=launch).verify(candidate, PROBLEM)
    assert not found.ok
    assert "outside the bound" in found.reason


def half(call):
    call.out[call.out.shape[0] // 2 :] = np.nan


def one_off(call):
    call.out[0, 3] = np.nextafter(call.out[0, 3], np.float16(np.inf)) + call.out[0, 3] / 64


def swapped(call):
    call.out[0, [1, 2]] = call.out[0, [2, 1]]


def before(call):
    call.out.base[GUARD - 1, -1] = 1


def behind(call):
    call.out.base[-GUARD, 0] = 1


def caller(call):
    next(a for a in call.args if isinstance(a, np.ndarray) and a.dtype == np.uint32 and a.ndim == 4)[0, 0, 0, 0] ^= 1


def arrivals(call):
    [a for a in call.args if isinstance(a, np.ndarray) and a.dtype == np.uint32 and a.ndim == 1][-1][0] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (half, "got nan"),
        (one_off, r"at \(0, 3\)"),
        (swapped, "outside the bound"),
        (before, "rows before or after"),
        (behind, "rows before or after"),
        (caller, "the caller's packed were changed"),
        (arrivals, "arrival counters"),
    ],
)
def test_every_kind_of_wrong_output_is_named(change, words):
    """e1: half an output, a neighbour's value, a trespass, a changed input, a counter left behind."""
    found = verifier(change).verify(Candidate("fused", CONFIG), PROBLEM)
    assert not found.ok
    assert re.search(words, found.reason)


def test_the_reference_itself_passes():
    for problem in (PROBLEM, Problem("w8a8-int8", 16, 384, 384), Problem("w8a8-fp8", 16, 384, 384)):
        cfg = kernels.default(problem, DEVICE)
        assert verifier().verify(Candidate("fused", cfg), problem).ok


def test_a_launch_that_faults_is_a_failure_with_its_reason():
    def launch(cfg, problem, call, arch):
        raise RuntimeError("an illegal memory access was encountered")

    found = Verifier(DEVICE, launch=launch).verify(Candidate("fused", CONFIG), PROBLEM)
    assert (found.ok, found.error) == (False, None)
    assert "illegal memory access" in found.reason


def test_equal_kernels_are_verified_once():
    check = verifier()
    candidate = Candidate("fused", dataclasses.replace(CONFIG, split_k=1))
    for m in (9, 16, 4096):
        assert check.verify(candidate, PROBLEM.with_m(m)).ok
    assert check.verify(candidate, dataclasses.replace(PROBLEM, n=1536)).ok
    assert check.launches == 1
    check.verify(candidate, dataclasses.replace(PROBLEM, n=1537))
    check.verify(candidate, dataclasses.replace(PROBLEM, group_size=64))
    assert check.launches == 3


def test_plain_cublas_needs_no_verification():
    found = verifier().verify(Candidate("fp16"), PROBLEM)
    assert (found.ok, found.error, found.how) == (True, None, "not needed")


def test_the_small_launch_has_whole_and_ragged_tiles_and_a_full_pipeline():
    long = dataclasses.replace(PROBLEM, k=28672 + 24, n=4098)
    for cfg in (CONFIG, dataclasses.replace(CONFIG, split_k=1, ctas=132)):
        small_cfg, small = small_launch(cfg, long)
        assert kernels.check(small_cfg, small, DEVICE) is None
        assert cfg.block_m < small.m < 2 * cfg.block_m
        assert cfg.block_n < small.n < 3 * cfg.block_n
        assert (small.n % 4 == 0) == (long.n % 4 == 0)
        assert small.k % cfg.block_k == long.k % cfg.block_k
        ctas = small_cfg.launch(small).grid[0]
        assert small_cfg.tiles(small) * small_cfg.k_tiles(small) == ctas * (cfg.stages + 2)
        assert kernels.source_hash(small_cfg, small) == kernels.source_hash(cfg, long)
    short = dataclasses.replace(PROBLEM, k=128)
    assert small_launch(CONFIG, short)[1].k == 128


@pytest.mark.parametrize("op", OPS)
def test_inputs_hold_extremes(op):
    inputs = adversarial(Problem(op, 19, 52, 256, symmetric=op != "w4a16"))
    x = inputs.x.astype(np.float64)
    assert np.isfinite(x).all()
    assert (x == 0).all(axis=1).any()
    assert np.abs(x).max() == 2048
    rows = np.abs(x).max(axis=1)
    assert 0 < rows[rows > 0].min() < 2.0**-8
    if op == "w4a16":
        assert set(np.unique(inputs.qw.zeros)) <= {0, 1, 7, 8, 14, 15}


def test_guard_rows_surround_the_output():
    whole, out = guarded((5, 84), np.dtype(np.float16))
    assert np.isnan(whole.astype(np.float32)).all()
    assert out.base is whole
    assert (out.shape, out.flags.c_contiguous) == ((5, 84), True)
    assert (out.ctypes.data - whole.ctypes.data) % 16 == 0


ROW = {
    "op": "w4a16", "dtype": "float16", "n": 384, "k": 384, "group_size": 128, "symmetric": True, "band": 16,
    "path": "fused", "config": kernels.to_dict(CONFIG), "device": "rtx-4090", "compute_capability": "8.9",
}  # fmt: skip


def test_a_row_of_the_database_is_verified_again():
    assert 0 < verify_row(ROW) < 1e-3
    assert verify_row({**ROW, "path": "fp16", "config": {}}) is None


def test_a_wrong_row_raises(monkeypatch):
    monkeypatch.setattr(verify, "_in_emulator", lambda cfg, problem, call, arch: half(call))
    with pytest.raises(VerificationError, match="nan"):
        verify_row(ROW)


def test_a_row_that_cannot_be_run_says_why():
    with pytest.raises(ArgumentError, match="cannot be read"):
        verify_row({**ROW, "config": {"family": "w3a16", "tile": 1}})
    with pytest.raises(ArgumentError, match="no known kind"):
        verify_row({**ROW, "device": "abacus", "compute_capability": "1.0"})


def test_a_rows_device_is_found_by_its_spec():
    spec = {f.name: getattr(DEVICE, f.name) for f in dataclasses.fields(DEVICE) if f.name not in ("live", "ordinal")}
    spec = {**spec, "cc": list(spec["cc"]), "unsure": list(spec["unsure"]), "invented_later": 3}
    assert verify._device_of({"spec": spec}).identity == DEVICE.identity
    assert verify._device_of({"device": "mig-slice", "compute_capability": "9.0"}).cc == (9, 0)
