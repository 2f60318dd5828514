"""Tuning one problem: what to try, in what order, when to stop, which candidate to keep, and that it is right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cupyq import bands
from cupyq.errors import ArgumentError, TuningError
from cupyq.kernels import Problem

from . import samplers
from .ahead import Ahead
from .candidate import Candidate, from_row
from .objective import THROTTLED, Objective, Outcome
from .proposals import AHEAD, Proposals
from .record import Past, Recorder
from .results import Choice, ProblemResult
from .selection import Ranked, finalists, rank
from .shared import Claim, Entry, SharedStudy
from .space import Space, neighbours
from .verify import Verification, Verifies

Ranking = Callable[[Sequence[Candidate], Problem], list[Candidate]]
"""Orders candidates by what the predictor thinks of them, fastest first."""

TRIALS = 64
"""Candidates tried by default where the space is too large to sweep."""

POLL_SECONDS = 1.0
"""How often a worker that has nothing to try looks whether the others are done."""

STOPPED = "the tuner was stopped while this trial ran"
"""The database's reason for a trial that was running when its process was killed."""


@dataclass(frozen=True)
class Settings:
    """How to tune.

    Parameters
    ----------
    trials : int, optional
        Candidates tried for a problem, those of earlier runs included. None: all of a space that is swept whole, and
        `TRIALS` of a larger one.
    sampler : str
        One of `samplers.NAMES`. "auto": sweep small spaces, and the predictor's ranking where its own word is all
        there is; TPE otherwise.
    seed : int
        Of the sampler.
    verify : bool
        Verify winners. Without it nothing found is used until `python -m cupyq.db verify`.
    """

    trials: int | None = None
    sampler: str = "auto"
    seed: int = 0
    verify: bool = True

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise ArgumentError(f"trials={self.trials}; accepted: 1 or more")
        if self.sampler not in samplers.NAMES:
            raise ArgumentError(f"sampler={self.sampler!r} is unknown; accepted: {', '.join(samplers.NAMES)}")


@dataclass
class ProblemTuner:
    """Tunes one problem on one device.

    Parameters
    ----------
    recorder : Recorder
    objective : Objective
    verifier : Verifies
    ranking : callable
    settings : Settings
    started_from : iterable of Candidate
        Winners of problems like this one, to try early.
    on_trial : callable, optional
        Told of each trial: (candidate, outcome).
    ahead : Ahead, optional
        Compiles what will be tried while something else is measured.
    shared : SharedStudy, optional
        The study of this problem on several machines.
    on_wait : callable, optional
        Told, while nothing is left but what other machines are trying, how many trials those are.
    """

    recorder: Recorder
    objective: Objective
    verifier: Verifies
    ranking: Ranking
    settings: Settings
    started_from: Iterable[Candidate] = ()
    on_trial: Callable[[Candidate, Outcome], None] | None = None
    ahead: Ahead | None = None
    shared: SharedStudy | None = None
    on_wait: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.problem = self.recorder.problem
        self.space = Space(self.problem, self.recorder.device)
        self.looks: dict[str, tuple[Candidate, Outcome]] = {}
        self.rows: dict[str, int] = {}
        self.tried: set[str] = set()
        self.result = ProblemResult(self.problem)
        self.trials = self.settings.trials or (len(self.space) if self.space.small else TRIALS)
        self._search_rows: dict[str, int] = {}
        self._checked: set[str] = set()
        self._elsewhere: set[str] = set()
        self._ranked: dict[str, list[Candidate]] = {}

    def run(self, deadline: float = float("inf")) -> ProblemResult:
        """Search until the trials are used up or `deadline` (of time.monotonic) has come, then choose.

        Raises
        ------
        TuningError
            No kernel runs here, or no candidate gave a time; the message says why.
        """
        self.space.require_fused()
        past = self.recorder.history()
        together = {} if self.shared is None else self._join(self.shared, past)
        settled = self._settled(past, together)
        if settled is not None:
            return settled
        self._remember(past)
        self._search(deadline)
        self._choose()
        return self._finish()

    # What is known

    def _join(self, shared: SharedStudy, past: Sequence[Past]) -> dict[str, Entry]:
        """Tell the other machines what was tried here; return what all of them have finished, by key."""
        tried = [p for p in past if p.phase == "search" and p.candidate is not None and not self._again(p)]
        mine = [(p.candidate, p.outcome) for p in tried if p.candidate is not None and p.candidate in self.space]
        return {entry.key: entry for entry in shared.join(mine) if entry.outcome is not None}

    def _settled(self, past: Sequence[Past], together: Mapping[str, Entry]) -> ProblemResult | None:
        """Return the result of an earlier run that leaves nothing to do."""
        tried = [p for p in past if p.phase == "search" and not self._again(p)]
        count = len(together if self.shared is not None else {p.key for p in tried})
        exhausted = count >= self.trials or (self.space.small and count >= len(self.space))
        usable = [p for p in past if p.verified or (p.outcome.ok and not self.settings.verify)]
        chosen = [p for p in usable if p.chosen and p.candidate and self.space.refusal(p.candidate) is None]
        if not (exhausted and chosen):
            return None
        result = self.result
        for path in {p.candidate.path for p in usable if p.candidate}:
            ways = [p for p in usable if p.candidate and p.candidate.path == path and p.phase != "check"]
            best = min(ways, key=lambda p: (not p.chosen, p.phase != "final", p.outcome.time_us or 0.0), default=None)
            if best is not None:
                result.by_path[path] = _choice(best)
        for entry in past:
            if entry.candidate == self.space.default and entry.outcome.ok and entry.phase != "check":
                result.default = entry.outcome
        result.trials = len(tried)
        result.states = Counter(entry.outcome.state for entry in tried)
        result.resumed = True
        return result

    def _remember(self, past: Sequence[Past]) -> None:
        self._checked = {entry.key for entry in past if entry.phase == "check"}
        for entry in past:
            if entry.phase != "search" or self._again(entry):
                continue
            self.tried.add(entry.key)
            self.result.states[entry.outcome.state] += 1
            if entry.candidate is not None and entry.candidate in self.space:
                self.looks[entry.key] = (entry.candidate, entry.outcome)
                self.rows[entry.key] = self._search_rows[entry.key] = entry.row_id
        self.result.trials = len(self.tried)

    def _again(self, entry: Past) -> bool:
        """Return whether a trial of an earlier run says nothing of its candidate, so that it may be tried again."""
        if entry.outcome.reason == STOPPED:
            # Whatever stopped it, the default is needed; and what becomes of a shared study's trial is its to say.
            return entry.candidate == self.space.default or self.shared is not None
        return entry.outcome.reason == THROTTLED

    def _rank(self, path: str) -> list[Candidate]:
        if path not in self._ranked:
            candidates = self.space.fused if path == "fused" else self.space.dequant
            self._ranked[path] = self.ranking(candidates, self.problem)
        return self._ranked[path]

    # Searching

    def _search(self, deadline: float) -> None:
        proposals = self._proposals()
        default = self.space.default
        if self.shared is not None:
            self._search_together(self.shared, proposals, deadline)
            return
        if default is not None and default.key not in self.tried:
            proposals.tell(default, self._try(default))  # whatever the budget: every winner is held against it
        while len(self.tried) < self.trials and time.monotonic() < deadline:
            candidate = proposals.next()
            if candidate is None:
                return
            proposals.tell(candidate, self._try(candidate))

    def _search_together(self, shared: SharedStudy, proposals: Proposals, deadline: float) -> None:
        """Search with workers elsewhere: none tries what another does, and the trials are those of all together."""
        default = self.space.default
        chosen: Candidate | None = None

        def note(entries: Sequence[Entry]) -> None:
            self._learn(entries, proposals)

        def choose() -> Candidate | None:
            nonlocal chosen
            if chosen is None or chosen.key in self.tried:
                chosen = default if default is not None and default.key not in self.tried else proposals.next()
            return chosen

        while True:
            claim = shared.claim(self.trials, note, choose)
            if claim is None and not shared.running:
                return
            if claim is None:
                time.sleep(POLL_SECONDS)
                if self.on_wait is not None:
                    self.on_wait(shared.running)
            else:
                with claim:
                    outcome = self._try(claim.candidate, claim)
                proposals.tell(claim.candidate, outcome)
            if time.monotonic() >= deadline:
                return

    def _learn(self, entries: Sequence[Entry], proposals: Proposals) -> None:
        """Take in what other workers tried, or are trying."""
        for entry in entries:
            if entry.outcome is None:
                self.tried.add(entry.key)
                if entry.candidate is not None:
                    proposals.take(entry.candidate)
            elif entry.key not in self.looks and entry.key not in self._elsewhere:
                self.tried.add(entry.key)
                self._elsewhere.add(entry.key)
                self.result.states[entry.outcome.state] += 1
                if entry.candidate is not None and entry.candidate in self.space:
                    self.looks[entry.key] = (entry.candidate, entry.outcome)
                    proposals.tell(entry.candidate, entry.outcome)
        self.result.elsewhere = len(self._elsewhere)
        self.result.trials = len(self.tried)

    def _proposals(self) -> Proposals:
        left = self.trials - len(self.tried)

        def starters() -> Iterator[Candidate]:
            found = list(self._starters(left))
            self._compile_ahead(found[: max(0, left)])
            yield from found

        def sampler() -> samplers.Sampler:
            made = self._sampler()
            if isinstance(made, samplers.Sweep):
                self._compile_ahead(self._rank("fused")[: self.trials])
            return made

        return Proposals(
            starters(),
            sampler,
            lambda: self._rank("dequant"),  # whatever budget the fused kernel leaves
            self.looks.values(),
            self.tried,
            depth=1 if self.ahead is None else AHEAD,
            announce=lambda candidate: self._compile_ahead([candidate]),
        )

    def _compile_ahead(self, candidates: Sequence[Candidate]) -> None:
        if self.ahead is not None:
            self.ahead.submit([c for c in candidates if c.key not in self.tried], self.problem)

    def _starters(self, left: int) -> Iterator[Candidate]:
        """Yield what is tried before the sampler has its say: yardsticks, what won nearby, the predictor's first."""
        yield self.space.fp16
        yield from self._rank("dequant")[: 1 if left < 32 else 2]
        store, device = self.recorder.store, self.recorder.device
        own = store.lookup(device, self.problem)
        known = [from_row({"path": own.path, "config": own.config})] if own is not None else []
        known += [*self.started_from, *neighbours(store, device, self.problem)]
        yield from self.space.legal(known)
        yield from self._rank("fused")[: max(1, left // 3)]

    def _sampler(self) -> samplers.Sampler:
        name = self.settings.sampler
        if name == "auto":
            name = "sweep" if self.space.small or self.objective.source == "predicted" else "tpe"
        # Workers that begin at different moments propose different candidates.
        seed = self.settings.seed + (0 if self.shared is None else self.shared.count)
        return samplers.make(name, self._rank("fused"), seed)

    def _try(self, candidate: Candidate, claim: Claim | None = None) -> Outcome:
        refusal = self.space.refusal(candidate)
        row = None
        if refusal is not None:  # never reaches the compiler
            outcome = Outcome("pruned", self.objective.source, reason=refusal)
        elif self.objective.source == "predicted":
            # Takes microseconds and cannot crash: there is no running trial to leave a trace of.
            outcome = self.objective.evaluate(candidate, self.problem)
        else:
            row = self.recorder.start(candidate)
            outcome = self.objective.evaluate(candidate, self.problem)
        try:
            if claim is not None and outcome.reason != THROTTLED:  # given back: another GPU may be cooler
                # Told before it is written here: whoever is killed in between leaves nothing that is tried twice.
                claim.finish(outcome)
        finally:
            if row is None:
                row = self.recorder.add(candidate, outcome)
            else:
                self.recorder.finish(row, candidate, outcome)
        self.tried.add(candidate.key)
        self.looks[candidate.key] = (candidate, outcome)
        self.rows[candidate.key] = self._search_rows[candidate.key] = row
        self.result.new_trials += 1
        self.result.trials = len(self.tried)
        self.result.states[outcome.state] += 1
        if self.on_trial is not None:
            self.on_trial(candidate, outcome)
        return outcome

    # Choosing

    def _choose(self) -> None:
        if not any(outcome.ok for _, outcome in self.looks.values()):
            raise TuningError(self._why_nothing())
        for path in ("fused", "dequant", "fp16"):
            choice = self._choose_of(path)
            if choice is not None:
                self.result.by_path[path] = choice
        default = self.space.default
        if default is not None and default.key in self.looks:
            self.result.default = self.looks[default.key][1]

    def _choose_of(self, path: str) -> Choice | None:
        """Return the fastest right candidate of a path, looking closer at a few at a time."""
        default = self.space.default if path == "fused" else None
        looks = [look for look in self.looks.values() if look[0].path == path and look[1].ok]
        while looks:
            near = finalists(looks)
            # Not looked at yet where another machine was at it when the time was up.
            if default is not None and default not in near and self._may_run(default):
                near.append(default)
            outcomes = self.objective.finals(near, self.problem)
            ranked = rank(list(zip(near, outcomes, strict=True)), default)
            for candidate, outcome in zip(near, outcomes, strict=True):
                self._looked_again(candidate, outcome)
            for entry in ranked:
                choice = self._verified(entry)
                if choice is not None:
                    return choice
            looks = [look for look in looks if look[0] not in near]
        return None

    def _may_run(self, candidate: Candidate) -> bool:
        return candidate.key not in self.looks or self.looks[candidate.key][1].ok

    def _looked_again(self, candidate: Candidate, outcome: Outcome) -> None:
        if self.objective.source == "predicted" and candidate.key in self.rows:
            # The same trial, seen with its compiled registers and spills.
            before = self.looks[candidate.key][1]
            if outcome != before:
                self.recorder.finish(self.rows[candidate.key], candidate, outcome)
                self.result.states[before.state] -= 1
                self.result.states[outcome.state] += 1
        else:
            self.rows[candidate.key] = self.recorder.add(candidate, outcome, phase="final")
        self.looks[candidate.key] = (candidate, outcome)

    def _verified(self, entry: Ranked) -> Choice | None:
        candidate, row = entry.candidate, self.rows[entry.candidate.key]
        if not self.settings.verify:
            return Choice(candidate, entry.outcome, None, row)
        verification = self.verifier.verify(candidate, self.problem)
        self.recorder.judged(row, verification)
        if verification.ok:
            return Choice(candidate, entry.outcome, verification, row)
        first = self._search_rows.get(candidate.key, row)
        if first != row:  # nor may its first look bring it back when the run is resumed
            self.recorder.judged(first, verification)
        self.result.rejected.append((candidate, verification))
        self.looks[candidate.key] = (candidate, entry.outcome.failed(verification.reason or "wrong"))
        return None

    def _why_nothing(self) -> str:
        reasons = Counter(outcome.reason or outcome.state for _, outcome in self.looks.values())
        said = "; ".join(f"{reason} ({count}x)" for reason, count in reasons.most_common(3))
        return f"none of {len(self.looks)} trials gave a time: {said}"

    def _finish(self) -> ProblemResult:
        winner = self.result.winner
        if winner is None:
            wrong = self.result.rejected
            said = wrong[0][1].reason if wrong else "no fused or dequant candidate gave a time"
            raise TuningError(f"no candidate can be used: {said}" + (f" ({len(wrong)} were wrong)" if wrong else ""))
        self.recorder.choose(winner.row_id)
        self._check_lower_end(winner)
        self.result.states = +self.result.states
        return self.result

    def _check_lower_end(self, winner: Choice) -> None:
        """Measure the winner at the band's lower end too; `Space.refusal` has seen that it is legal there."""
        if self.objective.source == "predicted":
            return  # the model of the upper end would only be asked again
        lower = self.problem.with_m(bands.lower_end(bands.of(self.problem.m)))
        if lower.m == self.problem.m or winner.candidate.key in self._checked:
            return
        outcome = self.objective.evaluate(winner.candidate, lower)
        verification = winner.verification
        self.recorder.add(
            winner.candidate, outcome, phase="check", problem=lower,
            verified=outcome.ok and verification is not None and verification.ok,
            error=None if verification is None else verification.error,
        )  # fmt: skip


def _choice(entry: Past) -> Choice:
    assert entry.candidate is not None  # only entries with one are asked
    verification = Verification(True, entry.error, None, "earlier") if entry.verified else None
    return Choice(entry.candidate, entry.outcome, verification, entry.row_id)
