"""Which candidate to try next: sweeps, random, Optuna's samplers, and greedy descent, behind one interface.

No sampler ever proposes a candidate twice, nor an illegal one: proposals are snapped to the nearest legal candidate
that has not been tried. What was tried before (in another process, with other choices of a field) is told as history.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from cupyq.errors import ArgumentError, NotInstalled

from .candidate import Candidate
from .gaussian import GaussianProcess
from .objective import Outcome
from .pool import Pool

NAMES = ("auto", "sweep", "random", "tpe", "gp", "cmaes", "greedy")


class Sampler(Protocol):
    """Proposes candidates of one space."""

    def propose(self) -> Candidate | None:
        """Return a candidate not yet tried, or None when there is none left."""
        ...

    def skip(self, candidate: Candidate) -> None:
        """Never propose a candidate (again): it is being tried, and what comes of it may be told later."""
        ...

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take note of what came of a candidate, whether proposed here or not."""
        ...


class Sweep:
    """Every candidate in the order given: a small space, or a ranking of a large one."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._left = list(candidates)[::-1]
        self._tried: set[Candidate] = set()

    def propose(self) -> Candidate | None:
        """Return the next candidate."""
        while self._left:
            candidate = self._left.pop()
            if candidate not in self._tried:
                return candidate
        return None

    def skip(self, candidate: Candidate) -> None:
        """Skip it from now on."""
        self._tried.add(candidate)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Skip it from now on."""
        del outcome
        self._tried.add(candidate)


class Random:
    """Candidates drawn with equal chance, none twice."""

    def __init__(self, candidates: Sequence[Candidate], seed: int = 0) -> None:
        order = np.random.default_rng(seed).permutation(len(candidates))
        self._sweep = Sweep([candidates[i] for i in order])
        self.propose = self._sweep.propose
        self.skip = self._sweep.skip
        self.tell = self._sweep.tell


class Greedy:
    """Descent from the best so far: all candidates that differ from it in one field, then in two."""

    def __init__(self, candidates: Sequence[Candidate], seed: int = 0) -> None:
        self._pool = Pool(candidates)
        self._rng = np.random.default_rng(seed)
        self._best: tuple[float, np.ndarray] | None = None

    def propose(self) -> Candidate | None:
        """Return an untried neighbour of the best, the nearest ring first and at random within it."""
        pool = self._pool
        left = np.flatnonzero(pool.untried)
        if left.size == 0:
            return None
        if self._best is None:
            return pool.candidates[int(self._rng.choice(left))]
        apart = pool.grid[left] != self._best[1]
        steps = np.abs(pool.grid[left] - self._best[1]).sum(axis=1)
        # Fields that differ count first; among those, the smaller step.
        cost = apart.sum(axis=1) * 100 + steps
        return pool.candidates[int(self._rng.choice(left[cost == cost.min()]))]

    def skip(self, candidate: Candidate) -> None:
        """Take it off what is left."""
        self._pool.remove(candidate)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Move there when it is faster than the best."""
        self._pool.remove(candidate)
        position = self._pool.position(candidate)
        if position is not None and outcome.ok and (self._best is None or outcome.time_us < self._best[0]):  # type: ignore[operator]
            self._best = (float(outcome.time_us), position)  # type: ignore[arg-type]


class OptunaSampler:
    """One of Optuna's samplers on the grid of the space, snapped to legal, untried candidates.

    The study lives in memory and is built anew from the history at each start, with the choices of today: a field
    whose choices changed since can be resumed, which a stored Optuna study refuses.
    """

    def __init__(self, candidates: Sequence[Candidate], sampler: Any, seed: int = 0) -> None:
        del seed
        optuna = import_optuna()
        self._pool = Pool(candidates)
        self._study = optuna.create_study(sampler=sampler)
        fields = self._pool.fields
        self._ranges = {
            name: optuna.distributions.IntDistribution(0, len(self._pool.values[name]) - 1) for name in fields
        }

    def propose(self) -> Candidate | None:
        """Ask Optuna for a place on the grid and return the nearest candidate that is legal and untried."""
        optuna = import_optuna()
        if not self._pool.untried.any():
            return None
        trial = self._study.ask(self._ranges)
        position = np.array([trial.params[name] for name in self._pool.fields], dtype=np.int64)
        # The place asked for may be illegal or tried, so what is told is the candidate that was really evaluated.
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return self._pool.nearest(position)

    def skip(self, candidate: Candidate) -> None:
        """Take it off what is left."""
        self._pool.remove(candidate)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Add the outcome to the study; a candidate whose choices are gone only counts as tried."""
        optuna = import_optuna()
        position = self._pool.position(candidate)
        self._pool.remove(candidate)
        if position is None:
            return
        states = optuna.trial.TrialState
        self._study.add_trial(
            optuna.trial.create_trial(
                params={name: int(place) for name, place in zip(self._pool.fields, position, strict=True)},
                distributions=self._ranges,
                state=states.COMPLETE if outcome.ok else states.FAIL,
                value=math.log(outcome.time_us) if outcome.ok else None,  # type: ignore[arg-type]
            )
        )


def import_optuna() -> Any:
    """Import Optuna when a sampler needs it: half a second that a sweep does without."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def make(name: str, candidates: Sequence[Candidate], seed: int = 0) -> Sampler:
    """Return a sampler by its name.

    Parameters
    ----------
    name : str
        "sweep" (in the order given), "random", "tpe", "gp", "cmaes" or "greedy".
    candidates : sequence of Candidate
        Of one path, legal, all with the same fields.
    seed : int
        Equal seeds and equal histories give equal proposals.
    """
    if name == "sweep":
        return Sweep(candidates)
    if not candidates:
        return Sweep(())
    if name == "random":
        return Random(candidates, seed)
    if name == "greedy":
        return Greedy(candidates, seed)
    if name == "gp":
        return GaussianProcess(candidates, seed)
    samplers = import_optuna().samplers
    if name == "tpe":
        # Startup trials come from the ranking, so few random ones are left to do.
        made = samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=5)
    elif name == "cmaes":
        if importlib.util.find_spec("cmaes") is None:
            raise NotInstalled("sampler='cmaes' needs a package of that name: pip install cmaes")
        made = samplers.CmaEsSampler(seed=seed, n_startup_trials=5, warn_independent_sampling=False)
    else:
        raise ArgumentError(f"sampler={name!r} is unknown; accepted: {', '.join(NAMES)}")
    return OptunaSampler(candidates, made, seed)


def resume(sampler: Sampler, history: Iterable[tuple[Candidate, Outcome]]) -> None:
    """Tell a new sampler everything tried before."""
    for candidate, outcome in history:
        sampler.tell(candidate, outcome)
