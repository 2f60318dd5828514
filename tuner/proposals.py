"""What to try next: starters, a sampler, the rest; asked for a little ahead, so that kernels can be compiled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from .candidate import Candidate
from .objective import Outcome
from .samplers import Sampler, resume

AHEAD = 4
"""Candidates asked for before their turn where something is compiled ahead. The sampler proposes each without knowing
what comes of the three before it, so this is a constant: equal seeds and equal outcomes propose the same anywhere."""


class Proposals:
    """Candidates in the order in which they are to be tried, none twice.

    Parameters
    ----------
    starters : iterable of Candidate
        Come first; read when they are needed.
    sampler : callable
        Makes the sampler, once the starters are used up.
    rest : callable
        Returns what follows when the sampler has nothing left.
    history : iterable of (Candidate, Outcome)
        What was tried before: never proposed, and told to the sampler.
    tried : iterable of str
        Keys of candidates that are never proposed either, though nothing is known of them here.
    depth : int
        Candidates asked for ahead, that of `next` included; 1 asks for each when its turn has come.
    announce : callable, optional
        Hears of each candidate as soon as it is in the queue.
    """

    def __init__(
        self,
        starters: Iterable[Candidate],
        sampler: Callable[[], Sampler],
        rest: Callable[[], Iterable[Candidate]],
        history: Iterable[tuple[Candidate, Outcome]] = (),
        tried: Iterable[str] = (),
        depth: int = 1,
        announce: Callable[[Candidate], None] | None = None,
    ) -> None:
        self._told = list(history)
        self._seen = {candidate.key for candidate, _ in self._told} | set(tried)
        self._pending: dict[str, Candidate] = {}
        self._queue: deque[Candidate] = deque()
        self._sampler: Sampler | None = None
        self._source = self._candidates(starters, sampler, rest)
        self._depth = depth
        self._announce = announce

    def _candidates(
        self, starters: Iterable[Candidate], make: Callable[[], Sampler], rest: Callable[[], Iterable[Candidate]]
    ) -> Iterator[Candidate]:
        yield from starters
        self._sampler = make()
        resume(self._sampler, self._told)
        for candidate in self._pending.values():
            self._sampler.skip(candidate)
        while (proposed := self._sampler.propose()) is not None:
            self._sampler.skip(proposed)
            yield proposed
        yield from rest()

    def next(self) -> Candidate | None:
        """Return the next candidate; None when there is none left."""
        while len(self._queue) < self._depth:
            candidate = next(self._source, None)
            if candidate is None:
                break
            if candidate.key not in self._seen:
                self._seen.add(candidate.key)
                self._pending[candidate.key] = candidate
                self._queue.append(candidate)
                if self._announce is not None:
                    self._announce(candidate)
        return self._queue.popleft() if self._queue else None

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take note of what came of a candidate, whether proposed here or not."""
        self.take(candidate)
        self._pending.pop(candidate.key, None)
        self._told.append((candidate, outcome))
        if self._sampler is not None:
            self._sampler.tell(candidate, outcome)

    def take(self, candidate: Candidate) -> None:
        """Never propose a candidate that somebody else tries, whose outcome may follow."""
        self._seen.add(candidate.key)
        if candidate in self._queue:
            self._queue.remove(candidate)
        self._pending[candidate.key] = candidate
        if self._sampler is not None:
            self._sampler.skip(candidate)
