"""What a tuning run found: per problem, per path, and where another path takes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cupyq.kernels import Problem

from .candidate import Candidate
from .objective import Outcome
from .verify import Verification


@dataclass(frozen=True)
class Choice:
    """The best candidate of one path.

    Attributes
    ----------
    verification : Verification or None
        None when verifying was switched off: the candidate is then not used by anyone yet.
    row_id : int
        Its trial in the database.
    """

    candidate: Candidate
    outcome: Outcome
    verification: Verification | None
    row_id: int


@dataclass
class ProblemResult:
    """What came of one problem.

    Attributes
    ----------
    problem : Problem
    by_path : dict of str to Choice
        The best of each path that has one: "fused", "dequant", "fp16".
    winner : Choice or None
        The faster of "fused" and "dequant".
    default : Outcome or None
        What the untuned default takes.
    new_trials, trials : int
        In this run, and in all.
    elsewhere : int
        Of these, by other machines of a shared study.
    states : Counter
        Trials by state.
    rejected : list of (Candidate, Verification)
        Fast, but wrong.
    reason : str or None
        Why there is no winner.
    resumed : bool
        Everything was in the database already.
    """

    problem: Problem
    by_path: dict[str, Choice] = field(default_factory=dict)
    default: Outcome | None = None
    new_trials: int = 0
    trials: int = 0
    elsewhere: int = 0
    states: Counter[str] = field(default_factory=Counter)
    rejected: list[tuple[Candidate, Verification]] = field(default_factory=list)
    reason: str | None = None
    resumed: bool = False

    @property
    def winner(self) -> Choice | None:
        """The faster of the ways to run quantized weights."""
        ways = [self.by_path[path] for path in ("fused", "dequant") if path in self.by_path]
        return min(ways, key=lambda choice: choice.outcome.time_us or float("inf"), default=None)

    @property
    def speedup_vs_fp16(self) -> float | None:
        """Time of plain fp16 over the winner's."""
        return _ratio(self.by_path.get("fp16"), self.winner)

    @property
    def speedup_vs_default(self) -> float | None:
        """Time of the untuned default over the winner's."""
        winner = self.winner
        if winner is None or self.default is None or not self.default.time_us or not winner.outcome.time_us:
            return None
        return self.default.time_us / winner.outcome.time_us


@dataclass
class RunResult:
    """What came of a whole run."""

    problems: list[ProblemResult] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    out_of_time: bool = False

    @property
    def states(self) -> Counter[str]:
        """Trials by state, over all problems."""
        total: Counter[str] = Counter()
        for result in self.problems:
            total.update(result.states)
        return total

    @property
    def new_trials(self) -> int:
        """Trials run this time."""
        return sum(result.new_trials for result in self.problems)

    @property
    def failed(self) -> list[ProblemResult]:
        """Problems that have no winner."""
        return [result for result in self.problems if result.winner is None]


def _ratio(other: Choice | None, one: Choice | None) -> float | None:
    if one is None or other is None or not one.outcome.time_us or not other.outcome.time_us:
        return None
    return other.outcome.time_us / one.outcome.time_us


@dataclass(frozen=True)
class Crossover:
    """Where the fused weight-only kernel stops being the fastest way for one weight shape.

    Attributes
    ----------
    problem : Problem
        Its shape, groups and types; M is the last band compared.
    band : int or None
        End of the first band from which another way is faster in every band compared from there on; None if there is
        none.
    winner : str or None
        The way that is faster there: "dequant", "fp16" or the op of an 8-bit scheme.
    fused_us, other_us : float or None
        Both times there.
    bands : tuple of int
        The bands compared.
    """

    problem: Problem
    band: int | None
    winner: str | None
    fused_us: float | None
    other_us: float | None
    bands: tuple[int, ...]


def crossovers(results: Iterable[ProblemResult]) -> list[Crossover]:
    """Return, per op, shape and group size of weight-only products, where another way takes over.

    Compared with the fused kernel are dequant + cuBLAS, plain fp16, and W8A8 on the same shape, dtype and M.
    """
    every = list(results)
    curves: dict[tuple[object, ...], list[ProblemResult]] = {}
    for result in every:
        p = result.problem
        if p.weight_only and "fused" in result.by_path:
            curves.setdefault((p.op, p.k, p.n, p.group_size, p.symmetric, p.dtype, p.scale_dtype), []).append(result)
    return [_crossover(sorted(curve, key=lambda r: r.problem.m), every) for curve in curves.values()]


def _crossover(curve: Sequence[ProblemResult], every: Sequence[ProblemResult]) -> Crossover:
    beaten: tuple[int, str, float, float] | None = None
    for result in curve:
        fused = result.by_path["fused"].outcome.time_us or float("inf")
        others = _others(result, every)
        name = min(others, key=lambda way: others[way], default=None)
        if name is None or others[name] >= fused:
            beaten = None
        elif beaten is None:
            beaten = (result.problem.m, name, fused, others[name])
    bands = tuple(result.problem.m for result in curve)
    if beaten is None:
        return Crossover(curve[-1].problem, None, None, None, None, bands)
    return Crossover(curve[-1].problem, *beaten, bands)


def _others(result: ProblemResult, every: Sequence[ProblemResult]) -> dict[str, float]:
    p = result.problem
    times = {
        path: choice.outcome.time_us for path, choice in result.by_path.items() if path != "fused"
    }  # fmt: skip
    for other in every:
        q = other.problem
        if not q.weight_only and (q.m, q.n, q.k, q.dtype) == (p.m, p.n, p.k, p.dtype) and "fused" in other.by_path:
            times[q.op] = other.by_path["fused"].outcome.time_us
    return {way: time_us for way, time_us in times.items() if time_us}
