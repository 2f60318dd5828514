"""A tuning run: problem after problem, within a budget, with everything kept whenever and however it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from cupyq import bands, db
from cupyq.devices import DeviceSpec
from cupyq.errors import CupyqError, TuningError
from cupyq.kernels import Problem
from cupyq.kernels.problem import WEIGHT_ONLY

from .ahead import Ahead
from .candidate import Candidate
from .objective import Objective, Outcome
from .one_problem import ProblemTuner, Ranking, Settings
from .record import Recorder
from .results import ProblemResult, RunResult
from .shared import Storage
from .verify import Verifies

NEIGHBOURS = 3
"""Winners of this very run, nearest in shape, that a problem starts from."""


class Progress(Protocol):
    """Is told how a run goes on."""

    def begin(self, problems: Sequence[Problem], settings: Settings) -> None:
        """Hear what is to be tuned."""
        ...

    def problem(self, problem: Problem) -> None:
        """Hear that a problem's turn has come."""
        ...

    def trial(self, problem: Problem, candidate: Candidate, outcome: Outcome) -> None:
        """Hear of one trial."""
        ...

    def done(self, result: ProblemResult) -> None:
        """Hear what came of a problem."""
        ...


class Silent:
    """Progress that nobody watches."""

    def begin(self, problems: Sequence[Problem], settings: Settings) -> None:
        """Say nothing."""

    def problem(self, problem: Problem) -> None:
        """Say nothing."""

    def trial(self, problem: Problem, candidate: Candidate, outcome: Outcome) -> None:
        """Say nothing."""

    def done(self, result: ProblemResult) -> None:
        """Say nothing."""


@dataclass
class Tuner:
    """Tunes problems on one device and writes what it finds to a database.

    Parameters
    ----------
    store : db.Store
    device : DeviceSpec
    objective : Objective
        Who says what a candidate costs.
    verifier : Verifies
        Who says whether it is right.
    ranking : callable
        (candidates, problem) -> the same, fastest first as far as the predictor can tell.
    settings : Settings
    seconds : float, optional
        Budget of the whole run, shared among the problems still to come. A problem begun is always finished with the
        choice among what was tried.
    progress : Progress
    ahead : Ahead, optional
        Compiles kernels before they are measured.
    stop : threading.Event
        Once set, the run ends as by Ctrl-C: for runs in threads of their own.
    weights : str, optional
        Name of the weights on which `quantization_errors` were taken.
    quantization_errors : mapping, optional
        Problem with M = 1 -> error of its quantization on those weights.
    storage : Storage, optional
        Where the studies are shared with other machines; it belongs to the caller, who closes it.
    """

    store: db.Store
    device: DeviceSpec
    objective: Objective
    verifier: Verifies
    ranking: Ranking
    settings: Settings = field(default_factory=Settings)
    seconds: float | None = None
    progress: Progress = field(default_factory=Silent)
    ahead: Ahead | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    weights: str | None = None
    quantization_errors: Mapping[Problem, float] = field(default_factory=dict)
    storage: Storage | None = None

    def run(self, problems: Iterable[Problem]) -> RunResult:
        """Tune every problem; Ctrl-C ends the run early and keeps what is done.

        Raises
        ------
        TuningError
            No problem at all could be tuned; the message says why.
        """
        todo = list(dict.fromkeys(problems))
        started = time.monotonic()
        result = RunResult()
        self.progress.begin(todo, self.settings)
        try:
            for place, problem in enumerate(todo):
                deadline = self._deadline(started, len(todo) - place)
                if deadline <= time.monotonic():
                    result.out_of_time = True
                    break
                self.progress.problem(problem)
                found = self._one(problem, deadline, result.problems)
                result.problems.append(found)
                self.progress.done(found)
        except KeyboardInterrupt:
            result.interrupted = True
        result.seconds = time.monotonic() - started
        reasons = list(dict.fromkeys(r.reason for r in result.failed if r.reason))
        if result.problems and len(result.failed) == len(result.problems):
            raise TuningError("; ".join(reasons[:3]))
        return result

    def close(self) -> None:
        """Let go of the objective and of the compiling processes."""
        self.objective.close()
        if self.ahead is not None:
            self.ahead.close()

    def _deadline(self, started: float, problems_left: int) -> float:
        if self.seconds is None:
            return float("inf")
        now = time.monotonic()
        left = started + self.seconds - now
        return now + left / problems_left if left > 0 else now

    def _one(self, problem: Problem, deadline: float, done: Sequence[ProblemResult]) -> ProblemResult:
        recorder = Recorder(
            self.store, self.device, problem, self.objective.source, asdict(self.settings), self.weights,
            self.quantization_errors.get(problem.with_m(1)),
        )  # fmt: skip

        def on_trial(candidate: Candidate, outcome: Outcome) -> None:
            self.progress.trial(problem, candidate, outcome)
            on_wait()

        def on_wait(_: int = 0) -> None:
            if self.stop.is_set():
                raise KeyboardInterrupt

        source = self.objective.source
        tuner = ProblemTuner(
            recorder,
            self.objective,
            self.verifier,
            self.ranking,
            self.settings,
            _nearest(problem, done),
            on_trial,
            self.ahead,
            on_wait=on_wait,
        )
        try:
            if self.storage is not None:
                tuner.space.require_fused()
                tuner.shared = self.storage.study(self.device, problem, source, self.store.environment)
            result = tuner.run(deadline)
        except KeyboardInterrupt:
            recorder.end("interrupted", "stopped by the user")
            raise
        except TuningError as error:
            recorder.end("failed", str(error))
            tuner.result.reason = str(error)
            return tuner.result
        except CupyqError as error:
            recorder.end("failed", str(error))
            raise
        recorder.end()
        return result


def _nearest(problem: Problem, done: Sequence[ProblemResult]) -> list[Candidate]:
    """Return winners of this run on problems of the same kind, nearest in shape first."""

    def distance(result: ProblemResult) -> float:
        other = result.problem
        pairs = ((other.m, problem.m), (other.n, problem.n), (other.k, problem.k))
        return sum(max(a, b) / max(1, min(a, b)) for a, b in pairs)

    alike = [r for r in done if r.winner is not None and r.problem.op == problem.op]
    winners = [r.winner.candidate for r in sorted(alike, key=distance) if r.winner is not None]
    return list(dict.fromkeys(winners))[:NEIGHBOURS]


def problems_of(
    shapes: Iterable[tuple[int, int]],
    ops: Sequence[str] = ("w4a16",),
    batches: Sequence[int] | None = None,
    group_sizes: Sequence[int] = (128,),
    dtype: str = "float16",
    symmetric: bool = True,
) -> list[Problem]:
    """Return the problems that a run over `shapes` tunes.

    Parameters
    ----------
    shapes : iterable of (K, N)
    ops : sequence of str
    batches : sequence of int, optional
        Each stands for the band that holds it; all bands by default.
    group_sizes : sequence of int
        For weight-only ops; W8A8 has one scale a column, or a block of 128.
    dtype : str
    symmetric : bool

    Returns
    -------
    list of Problem
        M is the upper end of a band, where it is tuned. None twice.
    """
    ends = sorted({bands.of(m) for m in batches}) if batches else list(bands.ends())
    scale_dtype = "float16"  # what `quantize` stores, whatever dtype the activations have
    made = [
        Problem(op, m, n, k, group_size, symmetric or op not in WEIGHT_ONLY, dtype, scale_dtype)
        for k, n in shapes
        for op in ops
        for group_size in (group_sizes if op in WEIGHT_ONLY else (128,))
        for m in ends
    ]
    return list(dict.fromkeys(made))
