"""Between a tuning run and the database: a study a problem, a row a trial, and what a resumed run learns of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupyq import db, kernels
from cupyq.devices import DeviceSpec
from cupyq.kernels import Problem

from .candidate import Candidate, from_row, source_hash, stable_key
from .objective import Outcome
from .verify import Verification


@dataclass(frozen=True)
class Past:
    """A trial that is in the database already.

    Attributes
    ----------
    key : str
        The candidate's, also where this version cannot read its config any more.
    candidate : Candidate or None
    outcome : Outcome
    row_id : int
    verified, chosen : bool
    phase : str
    """

    key: str
    candidate: Candidate | None
    outcome: Outcome
    row_id: int
    verified: bool
    chosen: bool
    phase: str
    error: float | None


class Recorder:
    """The study of one problem in the database.

    Parameters
    ----------
    store : db.Store
    device : DeviceSpec
    problem : Problem
    source : {"measured", "predicted"}
        Times of the two kinds never meet in one study.
    settings : mapping
        Sampler, seed, budget; kept with the study for people.
    weights : str, optional
        Whose weights quantization errors are taken on.
    quantization_error : float, optional
        Of this problem's group size on those weights; stored with every trial of a quantized path.
    """

    def __init__(
        self,
        store: db.Store,
        device: DeviceSpec,
        problem: Problem,
        source: str,
        settings: Mapping[str, Any],
        weights: str | None = None,
        quantization_error: float | None = None,
    ) -> None:
        self.store = store
        self.device = device
        self.problem = problem
        self.source = source
        self.quantization_error = quantization_error
        self.study = store.start_study(f"tune, {source}", device, problem, weights=weights, settings=settings)

    def history(self) -> list[Past]:
        """Return the trials of this study that still hold, in order.

        A trial of another kernel source than today's is left out: its config may be tried again.
        """
        rows = self.store.trials(study=self.study)
        return [past for row in reversed(rows) if (past := self._past(row)) is not None]

    def _past(self, row: Mapping[str, Any]) -> Past | None:
        candidate = from_row(row)
        if candidate is not None and candidate.config is not None:
            current = source_hash(candidate, self.problem)
            if row["source_hash"] is not None and row["source_hash"] != current:
                return None
        outcome = Outcome(
            row["state"], row["source"], row["reason"], row["time_us"], row["time_low_us"], row["time_high_us"],
            tuple(row["samples"] or ()), row["parts"], row["registers"], row["spill_bytes"], row["shared_bytes"],
            row["clock_mhz"], row["power_w"], row["temperature_c"], row["cache"], row["launch"],
        )  # fmt: skip
        key = stable_key(row["path"], row["config"])
        return Past(
            key, candidate, outcome, row["id"], row["verified"], row["chosen"], row["phase"], row["error"]
        )  # fmt: skip

    def trial(self, candidate: Candidate, outcome: Outcome, phase: str = "search", **more: Any) -> db.Trial:
        """Return the row of a trial."""
        problem = more.pop("problem", self.problem)
        return db.Trial(
            device=self.device,
            problem=problem,
            source=outcome.source,
            path=candidate.path,
            config=None if candidate.config is None else kernels.to_dict(candidate.config),
            state=outcome.state,
            reason=outcome.reason,
            time_us=outcome.time_us,
            time_low_us=outcome.low_us,
            time_high_us=outcome.high_us,
            samples_us=outcome.samples_us or None,  # type: ignore[arg-type]  # a thrown-away sample is null
            study=self.study,
            phase=phase,
            cache=outcome.cache,
            launch=outcome.launch,
            source_hash=source_hash(candidate, problem),
            registers=outcome.registers,
            spill_bytes=outcome.spill_bytes,
            shared_bytes=outcome.shared_bytes,
            clock_mhz=outcome.clock_mhz,
            power_w=outcome.power_w,
            temperature_c=outcome.temperature_c,
            parts=outcome.parts,
            quantization_error=None if candidate.path == "fp16" else self.quantization_error,
            **more,
        )

    def start(self, candidate: Candidate) -> int:
        """Write that a trial runs now, so that a crash of the machine leaves a trace; return its id."""
        return self.store.start_trial(self.trial(candidate, Outcome("running", self.source)))

    def finish(self, row_id: int, candidate: Candidate, outcome: Outcome, phase: str = "search") -> None:
        """Write what came of a started trial."""
        self.store.finish_trial(row_id, self.trial(candidate, outcome, phase))

    def add(self, candidate: Candidate, outcome: Outcome, phase: str = "search", **more: Any) -> int:
        """Write a trial that is over; return its id."""
        return self.store.record(self.trial(candidate, outcome, phase, **more))

    def judged(self, row_id: int, verification: Verification) -> None:
        """Write that a trial's kernel was verified, or that it is wrong and must never be used."""
        self.store.set_verified(row_id, verification.ok, verification.error, verification.reason)

    def choose(self, row_id: int) -> None:
        """Mark a trial as the study's winner."""
        self.store.choose(row_id)

    def end(self, state: str = "finished", reason: str | None = None) -> None:
        """Close the study."""
        self.store.finish_study(self.study, state, reason)
