"""What is tried next, asked for ahead: in order, none twice, the same from equal seeds, compiled before its turn."""

from __future__ import annotations

import pytest
from tuning_fakes import DEVICE, PROBLEM, steady

from cupyq.tuner import samplers
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.objective import Outcome
from cupyq.tuner.proposals import AHEAD, Proposals
from cupyq.tuner.space import Space

FUSED = Space(PROBLEM, DEVICE).fused[:60]
LEARNING = ("tpe", "gp", "greedy", "random")


def outcome(candidate: Candidate) -> Outcome:
    return Outcome("complete", "measured", time_us=steady(candidate, PROBLEM))


def proposals(sampler="tpe", depth=1, starters=(), rest=(), history=(), heard=None, seed=0):
    return Proposals(
        starters, lambda: samplers.make(sampler, FUSED, seed), lambda: rest, history, (), depth,
        None if heard is None else heard.append,
    )  # fmt: skip


def tried(made, count=1000):
    """Try up to `count` candidates, telling what comes of each; return them in order."""
    order = []
    while len(order) < count and (candidate := made.next()) is not None:
        order.append(candidate)
        made.tell(candidate, outcome(candidate))
    return order


@pytest.mark.parametrize("depth", [1, AHEAD])
@pytest.mark.parametrize("sampler", LEARNING)
def test_all_are_proposed_and_none_twice(sampler, depth):
    order = tried(proposals(sampler, depth, starters=FUSED[7:12]))
    assert order[:5] == list(FUSED[7:12])
    assert sorted(c.key for c in order) == sorted(c.key for c in FUSED)


@pytest.mark.parametrize("depth", [1, AHEAD])
@pytest.mark.parametrize("sampler", LEARNING)
def test_equal_seeds_propose_the_same(sampler, depth):
    assert tried(proposals(sampler, depth), 30) == tried(proposals(sampler, depth), 30)


@pytest.mark.parametrize("sampler", LEARNING)
def test_each_is_announced_before_the_three_before_it_are_tried(sampler):
    heard: list[Candidate] = []
    made = proposals(sampler, AHEAD, starters=FUSED[:3], heard=heard)
    for count in range(1, 20):
        candidate = made.next()
        assert len(heard) == count + AHEAD - 1
        assert heard[count - 1] == candidate
        made.tell(candidate, outcome(candidate))


def test_asking_ahead_still_learns():
    """The fourth proposal after an outcome knows of it: a search that asks ahead ends where one that does not ends."""

    def best(depth):
        return min(steady(c, PROBLEM) for seed in range(3) for c in tried(proposals("greedy", depth, seed=seed), 40))

    assert best(AHEAD) <= best(1) * 1.02


def test_history_is_told_and_not_proposed():
    history = [(c, outcome(c)) for c in FUSED[:20]]
    order = tried(proposals("tpe", AHEAD, history=history))
    assert sorted(c.key for c in order) == sorted(c.key for c in FUSED[20:])


def test_what_others_try_leaves_the_queue():
    made = proposals("sweep", AHEAD, rest=[Candidate("fp16")])
    assert made.next() == FUSED[0]
    made.take(FUSED[2])  # it is in the queue already
    made.take(FUSED[9])  # and this is not
    left = [c for i, c in enumerate(FUSED) if i not in (0, 2, 9)]
    assert tried(made) == [*left, Candidate("fp16")]
    assert made.next() is None


def test_the_tuner_has_sampled_candidates_compiled_before_their_turn(make):
    """Not the starters only: what TPE proposes is given to the compiling processes three trials ahead."""

    class Ahead:
        given: dict[str, int] = {}  # noqa: RUF012  (key -> how many had been given)

        def submit(self, candidates, problem):
            for candidate in candidates:
                self.given.setdefault(candidate.key, len(self.given))

        def close(self): ...

    tuner = make(trials=40, sampler="tpe")
    tuner.ahead, given_then, evaluate = Ahead(), [], tuner.objective.evaluate

    def watched(candidate, problem):
        given_then.append((candidate.key, dict(Ahead.given)))
        return evaluate(candidate, problem)

    tuner.objective.evaluate = watched
    tuner.run([PROBLEM])
    default = Space(PROBLEM, DEVICE).default.key
    sampled = given_then[-15:-1]  # the last is the check at the band's lower end
    assert len(sampled) == 14
    for key, given in sampled:
        assert key != default
        assert len(given) >= given[key] + AHEAD
