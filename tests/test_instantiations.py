"""Every instantiation of the fused kernels, in shuffled schedules under all four checks: `make test-catalogue`.

All of it takes hours; a part of it, the same every time, is among the slow tests.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from itertools import combinations

import pytest

import instantiations
from cupyq import kernels
from cupyq.kernels import Config, Problem
from cupyq.tuner.inputs import small_launch
from instantiations import GPUS, PLAIN, Instantiation

ALL = os.environ.get("CUPYQ_TEST_CATALOGUE") == "all"
PARTS, SHIPPED_PARTS = 64, 16

# Where mma.sync has no 8-bit floats (9.x to 11.x) the estimate of registers is too low for some of the largest tiles.
# The tuner prunes what spills once it is compiled, and presets hold none of it.
MAY_SPILL = ("w8a8-fp8", "w8a8-fp8-block")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_kernel_cache(monkeypatch):
    """Each kernel is compiled once, and there are gigabytes of them."""
    monkeypatch.setattr("cupyq.compiler.cache.read", lambda name: None)
    monkeypatch.setattr("cupyq.compiler.cache.write", lambda *entry: None)


@functools.lru_cache(maxsize=1)
def plain(op: str) -> list[Instantiation]:
    """Every shape of block, for the plain problem."""
    few = PLAIN[op].with_m(16)  # W8A8 kernels that quantize activations themselves are for few tokens
    return instantiations.every([PLAIN[op], few])


@functools.lru_cache(maxsize=1)
def drawn(op: str) -> list[Instantiation]:
    """Every shape of block, the problem drawn."""
    others = list(instantiations.problems_like(PLAIN[op]))
    return [instantiations.drawn(one, others) for one in plain(op)]


def clean(part: list[Instantiation], small: instantiations.Small = instantiations.half, spills: bool = True) -> None:
    assert part
    found = [fault for one in part for fault in instantiations.faults(one, small, spills)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", range(0, SHIPPED_PARTS, 1 if ALL else 4))
def test_every_kernel_of_the_presets(part):
    clean(instantiations.shipped()[part::SHIPPED_PARTS], small_launch)


@pytest.mark.parametrize("part", range(PARTS if ALL else 1))
@pytest.mark.parametrize("op", PLAIN)
def test_every_shape_of_block(op, part):
    clean([instantiations.thinned(one) for one in plain(op)[part::PARTS]], spills=op not in MAY_SPILL)


@pytest.mark.parametrize("part", range(PARTS if ALL else 1))
@pytest.mark.parametrize("op", PLAIN)
def test_every_shape_of_block_for_a_drawn_problem(op, part):
    clean([instantiations.thinned(one) for one in drawn(op)[part::PARTS]], spills=op not in MAY_SPILL)


def pairs(cfg: Config, prob: Problem) -> set[tuple[tuple[str, object], ...]]:
    """Return every two template arguments, or what decides them."""
    arguments = {**dataclasses.asdict(cfg), **dataclasses.asdict(prob), "split_k": None, "m": None}
    if "ctas" in arguments:
        arguments["ctas"] = arguments["ctas"] > 0
    return set(combinations(arguments.items(), 2))


@pytest.mark.parametrize("op", PLAIN)
def test_any_two_arguments_meet_in_what_is_drawn(op):
    met = set().union(*(pairs(next(iter(one.configs.values())), one.problem) for one in drawn(op)))
    others, legal = list(instantiations.problems_like(PLAIN[op])), set()
    for one in plain(op):
        arch, cfg = next(iter(one.configs.items()))
        for prob in random.Random(0).sample(others, min(8, len(others))):
            if kernels.check(cfg, prob, GPUS[arch]) is None:
                legal |= pairs(cfg, prob)
    assert legal <= met
