"""Compiled kernels on disk: many processes, files cut short, edited templates, folders that refuse, unknown GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest

from cupyq import compiler, kernels
from cupyq.compiler import cache, kernel, nvrtc
from cupyq.errors import CompileError, IllegalConfig
from cupyq.kernels import DequantConfig, Problem, W4A16Config

PROBLEM = Problem("w4a16", 8, 64, 256)
CONFIG = DequantConfig()

WORKER = """
import hashlib, json, sys, warnings
warnings.simplefilter("error")
from cupyq import compiler
from cupyq.compiler import kernel, nvrtc
from cupyq.kernels import DequantConfig, Problem
compiled = []
real = nvrtc.compile_source
nvrtc.compile_source = lambda *args: (compiled.append(1), real(*args))[1]
digests = set()
for turn in range(int(sys.argv[1])):
    kernel._compile.cache_clear()
    made = compiler.compile_kernel(DequantConfig(), Problem("w4a16", 8, 64, 256), f"sm_{sys.argv[2]}")
    digests.add(hashlib.sha256(made.ptx.encode() + made.cubin).hexdigest())
print(json.dumps([len(compiled), sorted(digests)]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of its own for each test, and no kernel in memory."""
    monkeypatch.setenv("CUPYQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    kernel._compile.cache_clear()
    yield tmp_path / "cache"
    kernel._compile.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """List what NVRTC is asked to compile."""
    asked = []
    real = nvrtc.compile_source

    def counting(source, name, arch):
        asked.append((name, arch))
        return real(source, name, arch)

    monkeypatch.setattr(nvrtc, "compile_source", counting)
    return asked


def compile_again(arch="sm_80"):
    kernel._compile.cache_clear()
    return compiler.compile_kernel(CONFIG, PROBLEM, arch)


def start(turns=1, arch="80"):
    command = [sys.executable, "-c", WORKER, str(turns), arch]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes):
    """Return [(compilations, digests)] of processes; their standard error must be empty."""
    results = []
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert (process.returncode, error) == (0, "")
        results.append(json.loads(out))
    return results


# --- many processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_processes_and_one_fresh_cache(folder):  # d2
    seen = set()
    for _ in range(20):
        for entry in folder.glob("*"):
            entry.unlink()
        for _, digests in finish([start() for _ in range(8)]):
            seen.update(digests)
        assert [len(name) for name in os.listdir(folder)] == [40]  # no temporary file is left
    assert len(seen) == 1


def test_processes_that_start_together_agree(folder):  # d2
    results = finish([start(turns=3) for _ in range(3)])
    assert len({digest for _, digests in results for digest in digests}) == 1
    assert all(count <= 1 for count, _ in results)
    assert len(os.listdir(folder)) == 1


def test_a_second_process_compiles_nothing(folder):  # d4
    assert finish([start()])[0][0] == 1
    assert finish([start()])[0][0] == 0


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 10, 100, -1000, -1])
def test_a_truncated_entry_is_compiled_again(folder, compilations, keep):  # d2
    first = compile_again()
    [entry] = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:keep])
    assert compile_again() == first
    assert len(compilations) == 2
    assert entry.read_bytes() == whole
    assert compile_again() == first
    assert len(compilations) == 2


@pytest.mark.parametrize("place", [0.02, 0.5, 0.99])
def test_a_flipped_byte_is_compiled_again(folder, compilations, place):
    first = compile_again()
    [entry] = folder.iterdir()
    content = bytearray(entry.read_bytes())
    content[int(place * len(content))] ^= 0x10
    entry.write_bytes(bytes(content))
    assert compile_again() == first
    assert len(compilations) == 2


def test_a_writer_that_dies_leaves_no_entry(folder, monkeypatch):
    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.write("a" * 40, {}, b"payload")
    assert list(folder.iterdir()) == []
    assert cache.read("a" * 40) is None


def test_a_folder_that_refuses_warns_once_and_compiles(folder, compilations):  # f4
    folder.write_text("a file where the folder should be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = compile_again(), compile_again()
    assert first == second
    assert len(compilations) == 2
    [warning] = caught
    assert "set CUPYQ_CACHE_DIR to a folder that can be written" in str(warning.message)


@pytest.mark.parametrize(
    "name", ["with a space", "k\N{LATIN SMALL LETTER E WITH DIAERESIS}rnels \N{CJK UNIFIED IDEOGRAPH-6838}"]
)
def test_any_folder_name_serves(tmp_path, monkeypatch, compilations, name):  # f4
    monkeypatch.setenv("CUPYQ_CACHE_DIR", str(tmp_path / name / "deep"))
    assert compile_again() == compile_again()
    assert len(compilations) == 1


# --- the key ----------------------------------------------------------------------------------------------------------


def test_every_byte_of_source_is_in_the_key(folder, compilations, monkeypatch):  # d3
    real = kernels.source(CONFIG, PROBLEM)
    compile_again()
    for edited in (real.replace("\n", " \n", 1), real + "\n", real.replace("kernel", "kernel", 1) + "// b"):
        monkeypatch.setattr(kernel, "source", lambda cfg, prob, text=edited: text)
        assert compile_again().source == edited
    assert len(compilations) == 4
    assert len(list(folder.iterdir())) == 4


def test_headers_are_in_the_source():  # d1, d3
    for config, problem in ((W4A16Config(), PROBLEM), (CONFIG, PROBLEM)):
        text = kernels.source(config, problem)
        assert "#include" not in text
        assert config.entry(problem) in text


@pytest.mark.parametrize("what", ["options", "version", "arch", "layout"])
def test_what_else_is_in_the_key(monkeypatch, compilations, what):  # d3, d5
    compile_again()
    if what == "options":
        monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=true"))
    elif what == "version":
        monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    elif what == "layout":
        monkeypatch.setattr(cache, "LAYOUT", "another")
    compile_again("sm_90" if what == "arch" else "sm_80")
    assert len(compilations) == 2


def test_parts_do_not_run_into_each_other():
    assert cache.key("ab", "c") != cache.key("a", "bc")


# --- architectures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_999", "sm_70", "compute_80", "80", "sm_80; rm", "", "sm_"])
def test_an_arch_that_nvrtc_does_not_know_is_named(compilations, arch):  # d5
    with pytest.raises(CompileError, match=r"is not known to NVRTC [\d.]+; it compiles for sm_75, ") as caught:
        compiler.compile_kernel(CONFIG, PROBLEM, arch)
    assert repr(arch) in str(caught.value)
    assert not compilations


def test_an_illegal_config_is_refused_before_compiling(compilations):
    with pytest.raises(IllegalConfig, match=r"stages=3: without cp\.async"):
        compiler.compile_kernel(W4A16Config(block_m=8, stages=3), PROBLEM, "sm_75")
    assert not compilations


def test_what_nvrtc_says_is_in_the_error(monkeypatch):  # e3
    monkeypatch.setattr(kernel, "source", lambda cfg, prob: "#include <cuda_fp17.h>\n")
    with pytest.raises(CompileError, match=r"(?s)NVRTC [\d.]+ refused .*cuda_fp17\.h"):
        compile_again()
