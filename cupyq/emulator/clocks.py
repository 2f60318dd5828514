"""Vector clocks: what every warp of a wave knows of every other one's past.

Time counts synchronizing events of a launch. ``clock[w, s]`` is the time up to which the accesses of warp `s` of the
same CTA come before whatever warp `w` does next; columns beyond the warps stand for asynchronous agents (each
warpgroup's wgmma, and bulk copies). What is known of other CTAs is kept apart, since few warps ever learn of any.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WARP_BITS = 6
TIME_SHIFT = WARP_BITS + 1  # a packed write is: time, atomic flag, column of the writer
ATOMIC = 1 << WARP_BITS
FOREVER = (1 << 32 - TIME_SHIFT) - 1  # the time of what is still in flight: ordered before nothing


class Clocks:
    """Clocks of one wave, and the releases and acquires that carry them about."""

    def __init__(self, m: Any, history: Any) -> None:
        self.m, self.history = m, history
        self.per_cta = m.warps_per_cta
        parts = [i.parts for i in m.program.code]
        groups = -(-self.per_cta // 4) if any(p[0] == "wgmma" for p in parts) else 0
        bulk = any("bulk" in p or p[:2] == ("st", "async") for p in parts)
        self.agents, self.has_bulk = groups + bulk, bulk
        self.columns = self.per_cta + self.agents
        self.bulk_column = self.columns - 1
        self.local_warp = m.all_warps % self.per_cta
        self.first_warp = m.first * self.per_cta
        self.clock = np.zeros((m.W, self.columns), np.int64)
        self.own = (m.all_warps, self.local_warp)
        self.clock[self.own] = FOREVER
        # The same for writes that a proxy fence has made visible to the async proxy.
        self.proxied = np.zeros((m.W, self.columns), np.int64) if self.agents else None
        self.least = np.zeros(m.W, np.int64)  # what a warp knows of every other warp
        self.refresh(slice(None))
        self.beyond: dict[int, np.ndarray] = {}  # knowledge of other CTAs' warps, once there is any
        self.collected: dict[int, np.ndarray] = {}  # seen by relaxed reads, known after the next fence
        self.fence_clock = np.zeros((m.W, self.columns), np.int64)
        self.fence_beyond: dict[int, np.ndarray] = {}
        self.fence_kind = np.zeros(m.W, np.int8)  # 0 none, 1 cta, 2 wider

    @property
    def now(self) -> int:
        return self.history.now

    def tick(self) -> None:
        self.history.now += 1
        if self.history.now >= FOREVER - 1:
            raise OverflowError("too many synchronizing events in one launch")

    def refresh(self, rows: Any) -> None:
        self.least[rows] = self.clock[rows][:, : self.per_cta].min(1)

    def present(self, warps: np.ndarray) -> np.ndarray:
        """Clocks of warps as a release hands them on: their own column says now."""
        rows = self.clock[warps]
        rows[np.arange(len(warps)), self.local_warp[warps]] = self.now
        return rows

    # ---- barriers

    def barrier_all(self) -> None:
        """Every warp of every CTA passed a barrier of its CTA."""
        per = self.per_cta
        if self.agents:
            by_cta = self.clock.reshape(-1, per, self.columns)
            by_cta[:, :, per:] = by_cta[:, :, per:].max(1, keepdims=True)
            proxied = self.proxied.reshape(-1, per, self.columns)
            proxied[...] = proxied.max(1, keepdims=True)
        self.clock[:, :per] = self.now
        self.clock[self.own] = FOREVER
        if self.beyond or self.collected:
            for cta in range(self.m.ctas):
                self._share(range(cta * per, (cta + 1) * per))
        if self.fence_kind.any():
            by_cta = self.fence_clock.reshape(-1, per, self.columns)
            by_cta[...] = by_cta.max(1, keepdims=True)
            kinds = self.fence_kind.reshape(-1, per)
            kinds[...] = kinds.max(1, keepdims=True)
        self.tick()
        self.refresh(slice(None))

    def barrier(self, cta: int, members: np.ndarray) -> None:
        """The warps `members` (of one CTA, or of one cluster) met at a barrier."""
        members = np.unique(members)
        if self.m.cluster_size > 1 and len(np.unique(self.m.cta_of_warp[members])) > 1:
            known = np.maximum.reduce([self.snapshot(int(w)) for w in members])
            for w in members:
                self.learn(int(w), known)
            self.tick()
            return
        self.clock[members] = self.present(members).max(0)
        self.clock[members, self.local_warp[members]] = FOREVER
        if self.proxied is not None:
            self.proxied[members] = self.proxied[members].max(0)
        if self.beyond or self.collected:
            self._share(members)
        if self.fence_kind[members].any():
            # What one warp fenced before the barrier is visible beyond the CTA when another one, after the barrier,
            # tells of it.
            self.fence_clock[members] = self.fence_clock[members].max(0)
            self.fence_kind[members] = self.fence_kind[members].max()
        self.tick()
        self.refresh(members)

    def _share(self, members: Any) -> None:
        for table in (self.beyond, self.collected, self.fence_beyond):
            have = [table[int(w)] for w in members if int(w) in table]
            if have:
                joined = np.maximum.reduce(have)
                for w in members:
                    table[int(w)] = joined

    # ---- fences, releases, acquires

    def fence(self, g: Any, active: np.ndarray | None, scope: str) -> None:
        """What relaxed reads saw is known from here; what later relaxed writes show carries what is known here."""
        warps = g.warps if active is None else g.warps[active.any(1)]
        if self.collected:
            for w in warps:
                seen = self.collected.pop(int(w), None)
                if seen is not None:
                    self.learn(int(w), seen)
        self.fence_clock[warps] = self.present(warps)
        self.fence_kind[warps] = 1 if scope == "cta" else 2
        for w in warps if self.beyond else ():
            if int(w) in self.beyond:
                self.fence_beyond[int(w)] = self.beyond[int(w)]
        self.tick()

    def proxy_fence(self, g: Any, ins: Any, active: np.ndarray | None) -> None:
        """All that these warps know of becomes visible to the async proxy."""
        if self.proxied is not None:
            warps = g.warps if active is None else g.warps[active.any(1)]
            self.proxied[warps] = np.maximum(self.proxied[warps], self.present(warps))
            self.tick()

    def snapshot(self, warp: int, clock: np.ndarray | None = None, beyond: Any = None) -> np.ndarray:
        """All that a warp knows, over the warps of the launch."""
        cta = int(self.m.cta_of_warp[warp])
        base = self.first_warp + cta * self.per_cta
        out = np.zeros(self.history.warps, np.int64)
        if clock is None:
            clock = self.present(np.array([warp]))[0]
            beyond = self.beyond.get(warp)
        if beyond is not None:
            out[:] = beyond
        out[base : base + self.per_cta] = np.maximum(out[base : base + self.per_cta], clock[: self.per_cta])
        return out

    def learn(self, warp: int, known: np.ndarray) -> None:
        """A warp takes over what a release it acquired knew."""
        base = self.first_warp + int(self.m.cta_of_warp[warp]) * self.per_cta
        mine = self.clock[warp]
        mine[: self.per_cta] = np.maximum(mine[: self.per_cta], known[base : base + self.per_cta])
        mine[self.local_warp[warp]] = FOREVER
        self.refresh(np.array([warp]))
        old = self.beyond.get(warp)
        self.beyond[warp] = known if old is None else np.maximum(old, known)

    def synchronize(
        self, g: Any, space: str, flat: np.ndarray, active: Any, order: str, sequence: Any, write: bool, read: bool
    ) -> None:
        """Release and acquire through one location, thread by thread in the order they were served."""
        published = self.history.published
        releases = "release" in order or "acq_rel" in order
        acquires = "acquire" in order or "acq_rel" in order
        if not releases and not (write and self.fence_kind[g.warps].any()) and not published:
            return
        warps = g.flat_warps(active)
        seen: set = set()
        for i in range(len(flat)) if sequence is None else sequence:
            warp = int(warps[i])
            where = (space, int(flat[i]))
            if sequence is None and (warp, where) in seen:
                continue
            seen.add((warp, where))
            near = (*where, int(self.m.cta_of_warp[warp]) + self.m.first)
            if read:
                for key in (where, near):
                    known = published.get(key)
                    if known is None:
                        continue
                    if acquires:
                        self.learn(warp, known)
                    else:
                        old = self.collected.get(warp)
                        self.collected[warp] = known if old is None else np.maximum(old, known)
            if write:
                kind = int(self.fence_kind[warp])
                if releases:
                    shown, narrow = self.snapshot(warp), order.endswith(".cta")
                elif kind:
                    shown = self.snapshot(warp, self.fence_clock[warp], self.fence_beyond.get(warp))
                    narrow = kind == 1
                else:
                    continue
                key = near if narrow else where
                old = published.get(key)
                published[key] = shown if old is None else np.maximum(old, shown)
        if releases:
            self.tick()
