"""The predictor as an objective: what a candidate costs on a GPU that is not here. Every time says `predicted`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyq import compiler, kernels, predictor
from cupyq.devices import DeviceSpec
from cupyq.errors import CompileError, CupyqError, IllegalConfig
from cupyq.kernels import Problem

from .candidate import Candidate
from .objective import Outcome


class PredictedObjective:
    """Predicted times: the closed form while searching, with compiled registers and spills for the finalists.

    Parameters
    ----------
    device : DeviceSpec
        Of the catalogue, or a live one.
    compile_finalists : bool
        False leaves the finalists at the closed form too, where NVRTC is not installed.
    """

    source = "predicted"

    def __init__(self, device: DeviceSpec, compile_finalists: bool = True) -> None:
        self.device = device
        self.compile_finalists = compile_finalists

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        """Return the closed form's prediction."""
        return self._predict(candidate, problem, None)

    def finals(self, candidates: Sequence[Candidate], problem: Problem) -> list[Outcome]:
        """Return predictions that know the compiled kernel; a kernel that spills is pruned."""
        return [self._final(candidate, problem) for candidate in candidates]

    def _final(self, candidate: Candidate, problem: Problem) -> Outcome:
        if candidate.config is None or not self.compile_finalists:
            return self.evaluate(candidate, problem)
        try:
            compiled = compiler.compile_kernel(candidate.config, problem, self.device.arch)
        except (CompileError, IllegalConfig) as error:
            return Outcome("failed", self.source, reason=f"{type(error).__name__}: {error}".splitlines()[0])
        if compiled.spill_bytes:
            return Outcome(
                "pruned", self.source, reason=f"spills {compiled.spill_bytes} bytes a thread to local memory",
                registers=compiled.registers, spill_bytes=compiled.spill_bytes, shared_bytes=compiled.shared_bytes,
            )  # fmt: skip
        return self._predict(candidate, problem, compiled)

    def _predict(self, candidate: Candidate, problem: Problem, compiled: Any) -> Outcome:
        try:
            found = _ask(candidate, problem, self.device, compiled)
        except CupyqError as error:
            return Outcome("failed", self.source, reason=str(error))
        facts: dict[str, Any] = {}
        if compiled is not None:
            facts = {
                "registers": compiled.registers,
                "spill_bytes": compiled.spill_bytes,
                "shared_bytes": compiled.shared_bytes,
            }
        return Outcome("complete", self.source, time_us=found.time_us, parts=dict(found.parts), **facts)

    def close(self) -> None:
        """Nothing is held."""


def _ask(candidate: Candidate, problem: Problem, device: DeviceSpec, compiled: Any = None) -> Any:
    what: kernels.Config | str = candidate.path if candidate.config is None else candidate.config
    return predictor.predict(what, problem, device, compiled=compiled)


def _order(candidate: Candidate, problem: Problem, device: DeviceSpec) -> float:
    """Return a time to order legal candidates by: the kernel's own, without what all of a path have in common."""
    if candidate.path != "fused" or candidate.config is None:
        return _ask(candidate, problem, device).time_us
    return predictor.predict_profile(predictor.profile(candidate.config, problem, device), device).time_us


def ranking(device: DeviceSpec, limit: int | None = None) -> Any:
    """Return a function that orders candidates by the closed form on `device`, fastest first.

    Parameters
    ----------
    device : DeviceSpec
    limit : int, optional
        Ask about this many candidates at most, evenly spread over those given; the others follow in their own order.
    """

    def rank(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
        step = 1 if limit is None else max(1, -(-len(candidates) // limit))
        asked = candidates[::step]
        times: list[tuple[float, int]] = []
        for index, candidate in enumerate(asked):
            try:
                times.append((_order(candidate, problem, device), index))
            except CupyqError:
                times.append((float("inf"), index))
        times.sort()
        first = [asked[index] for _, index in times]
        if step == 1:
            return first
        known = {candidate.key for candidate in first}
        return first + [candidate for candidate in candidates if candidate.key not in known]

    return rank
