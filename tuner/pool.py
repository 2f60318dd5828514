"""The candidates of a space as places on a grid, and which of them are left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .candidate import Candidate


class Pool:
    """The candidates that are left, with their fields as positions on a grid.

    A field's values are sorted, so that neighbours on the grid are alike; words come in the order of the alphabet.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = list(candidates)
        self.index = {candidate: i for i, candidate in enumerate(self.candidates)}
        self.fields = list(self.candidates[0].tunables) if self.candidates else []
        self.values = {name: sorted({c.tunables[name] for c in self.candidates}) for name in self.fields}
        places = {name: {value: i for i, value in enumerate(values)} for name, values in self.values.items()}
        self.grid = np.array(
            [[places[name][c.tunables[name]] for name in self.fields] for c in self.candidates], dtype=np.int64
        ).reshape(len(self.candidates), len(self.fields))
        self.untried = np.ones(len(self.candidates), dtype=bool)
        spans = self.grid.max(axis=0) if len(self.candidates) else np.zeros(0)
        self._weights = 1.0 / np.maximum(spans, 1)

    def unit_grid(self) -> np.ndarray:
        """Return every candidate's place with each field scaled to 0..1."""
        return self.grid * self._weights

    def position(self, candidate: Candidate) -> np.ndarray | None:
        """Return the candidate's place on the grid, or None when a field has a value the space no longer offers."""
        i = self.index.get(candidate)
        return None if i is None else self.grid[i]

    def remove(self, candidate: Candidate) -> None:
        """Take the candidate off what is left."""
        i = self.index.get(candidate)
        if i is not None:
            self.untried[i] = False

    def nearest(self, position: np.ndarray) -> Candidate | None:
        """Return the untried candidate nearest to a place on the grid; the first of several."""
        left = np.flatnonzero(self.untried)
        if left.size == 0:
            return None
        distances = (np.abs(self.grid[left] - position) * self._weights).sum(axis=1)
        return self.candidates[left[int(distances.argmin())]]
