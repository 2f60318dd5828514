"""A process of its own for each GPU, watched: an illegal address, a hang or a crash costs one trial and a new process.

After a fault a CUDA context is lost for good, and a kernel that never ends cannot be stopped from within its process.
So the objective that owns the GPU lives in a child; when it fails, dies or says nothing for too long, it is replaced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import Any

from cupyq.errors import CupyqError
from cupyq.kernels import Problem

from .candidate import Candidate
from .objective import Objective, Outcome
from .verify import Verification

SECONDS = 60.0
"""How long one candidate may take, compiling included, before its process counts as hung."""

START_SECONDS = 120.0
"""How long a new process may take to start and set up its GPU."""

# Failures that leave the process and its context as they were.
_HARMLESS = ("CompileError", "IllegalConfig", "TimeoutError", "the time is", "every sample was")

Make = Callable[..., Objective]


class WorkerObjective:
    """An objective in a watched child process.

    Parameters
    ----------
    make : callable
        Makes the objective, in the child; found by its module and name, so no lambda.
    arguments : tuple
        Of `make`.
    source : {"measured", "predicted"}
    seconds : float
        Most time for one candidate.
    """

    def __init__(
        self, make: Make, arguments: tuple[Any, ...] = (), source: str = "measured", seconds: float = SECONDS
    ) -> None:
        self.source = source
        self.seconds = seconds
        self.started = 0
        self._make, self._arguments = make, arguments
        self._process: Any = None
        self._pipe: Any = None

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        """Evaluate in the child; whatever happens to that is a failed outcome with a reason."""
        answer = self._ask("evaluate", candidate, problem, seconds=self.seconds)
        return answer if isinstance(answer, Outcome) else Outcome("failed", self.source, reason=answer)

    def finals(self, candidates: Sequence[Candidate], problem: Problem) -> list[Outcome]:
        """Look at the finalists again, interleaved; one that faults is found by itself and left out."""
        answer = self._ask("finals", list(candidates), problem, seconds=self.seconds * (1 + len(candidates)))
        if isinstance(answer, list):
            return answer
        alone = [self.evaluate(candidate, problem) for candidate in candidates]
        sound = [candidate for candidate, outcome in zip(candidates, alone, strict=True) if outcome.ok]
        again = self._ask("finals", sound, problem, seconds=self.seconds * (1 + len(sound))) if sound else []
        if not isinstance(again, list):
            return alone
        seen = iter(again)
        return [next(seen) if outcome.ok else outcome for outcome in alone]

    def verify(self, candidate: Candidate, problem: Problem) -> Verification:
        """Verify in the child, where a wrong kernel may do what it likes; needs an objective that verifies."""
        answer = self._ask("verify", candidate, problem, seconds=self.seconds)
        return answer if isinstance(answer, Verification) else Verification(False, None, answer, "gpu")

    def close(self) -> None:
        """End the child."""
        if self._process is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._pipe.send(None)
            self._process.join(5)
        self._end()

    def _ask(self, method: str, what: Any, problem: Problem, seconds: float) -> Any:
        """Return the child's answer, or a sentence saying what became of the child."""
        try:
            self._start()
            self._pipe.send((method, what, problem))
            if not self._pipe.poll(seconds):
                self._end()
                return f"hung: no answer in {seconds:g} s, so its process was ended"
            answer = self._pipe.recv()
        except (EOFError, OSError):
            return self._obituary()
        except BaseException:  # Ctrl-C while waiting: the answer that still comes must not be taken for the next one's
            self._end()
            raise
        if isinstance(answer, Exception):  # the caller's mistake or a missing package, not the candidate's fault
            raise answer
        if any(_faulty(outcome) for outcome in (answer if isinstance(answer, list) else [answer])):
            self._end()  # its CUDA context may be lost; a new one certainly is not
        return answer

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        self._end()
        context = multiprocessing.get_context("spawn")  # a forked CUDA context is unusable
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._make, self._arguments), daemon=True, name="cupyq-worker"
        )
        self._process.start()
        theirs.close()
        self.started += 1
        if not self._pipe.poll(START_SECONDS):
            raise OSError("the worker did not start")
        self._pipe.recv()

    def _obituary(self) -> str:
        process = self._process
        if process is None:
            return "its process could not be started"
        process.join(5)
        code = process.exitcode
        self._end()
        if code is None:
            return "its process stopped answering"
        if code < 0:
            return f"its process died of {signal.Signals(-code).name}"
        return f"its process left with status {code}"

    def _end(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _faulty(outcome: Outcome | Verification) -> bool:
    if isinstance(outcome, Verification):
        return not outcome.ok and outcome.error is None  # it did not get as far as a comparison
    return outcome.state == "failed" and not (outcome.reason or "").startswith(_HARMLESS)


def _serve(pipe: Any, make: Make, arguments: tuple[Any, ...]) -> None:
    """Answer requests until told to stop, or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which says when to stop
    objective = make(*arguments)
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError, BrokenPipeError):
        while (request := pipe.recv()) is not None:
            method, what, problem = request
            try:
                answer = getattr(objective, method)(what, problem)
            except CupyqError as error:
                answer = error
            pipe.send(answer)
    objective.close()
