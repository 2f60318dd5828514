"""One study on several machines, through a real PostgreSQL: who tries what, and what becomes of a worker that dies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import postgresql
import pytest
from tuning_fakes import DEVICE, PROBLEM, QUICK, in_order, steady

from cupyq import db, devices, kernels, tune
from cupyq.db.environment import Environment
from cupyq.errors import ArgumentError, DatabaseError, NotInstalled, TuningError
from cupyq.tuner import shared
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.fake import FakeDevice, FakeVerifier
from cupyq.tuner.objective import Outcome
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.space import Space
from cupyq.tuner.study import Silent, Tuner

HERE = Path(__file__).resolve().parent
TRIALS = 60
HEARTBEAT, GRACE = 1, 5
PROGRAM = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import time
from tuning_fakes import DEVICE, PROBLEM, QUICK, in_order, steady
from cupyq import db
from cupyq.tuner import one_problem, shared
from cupyq.tuner.fake import FakeDevice, FakeVerifier
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.study import Silent, Tuner

one_problem.POLL_SECONDS = 0.2

class Slow(FakeDevice):
    seen = 0

    def evaluate(self, candidate, problem):
        if problem == PROBLEM:  # the winner is checked at its band's lower end as well
            print(candidate.key, flush=True)
            self.seen += 1
            time.sleep(300 if self.seen == int(sys.argv[4]) else 0.1)
        return super().evaluate(candidate, problem)

storage = shared.Storage(sys.argv[2], {HEARTBEAT}, {GRACE})
with db.open(sys.argv[1]) as store:
    fake = Slow(DEVICE, steady, search=QUICK, final=QUICK)
    tuner = Tuner(store, DEVICE, fake, FakeVerifier(), in_order, Settings({TRIALS}, sys.argv[3]), storage=storage)
    print("ready", flush=True)
    sys.stdin.readline()
    [result] = tuner.run([PROBLEM]).problems
    print("winner", result.winner.candidate.key, result.trials, result.new_trials, result.elsewhere, flush=True)
storage.close()
"""


@pytest.fixture(scope="module")
def server():
    with postgresql.running() as started:
        yield started


@pytest.fixture
def storage(server):
    """A storage whose studies no other test has."""
    with contextlib.closing(shared.Storage(server.url, HEARTBEAT, GRACE)) as opened:
        for study in opened.optuna.get_all_study_names(opened.rdb):
            opened.optuna.delete_study(study_name=study, storage=opened.rdb)
        yield opened


def trials(storage):
    [name] = storage.optuna.get_all_study_names(storage.rdb)
    return storage.optuna.load_study(study_name=name, storage=storage.rdb).get_trials()


def by_state(found, state):
    return [trial.user_attrs["key"] for trial in found if trial.state.name == state]


def tuner(store, storage, trials, sampler="auto", progress=None, times=steady, **settings):
    fake = FakeDevice(DEVICE, times, search=QUICK, final=QUICK)
    more = {} if progress is None else {"progress": progress}
    return Tuner(
        store, DEVICE, fake, FakeVerifier(), in_order, Settings(trials, sampler), storage=storage, **more, **settings
    )


@pytest.mark.parametrize("sampler", ["sweep", pytest.param("tpe", marks=pytest.mark.slow)])
def test_four_workers_share_a_study_and_one_is_killed(server, storage, tmp_path, sampler):
    """Every finished trial is there once and no more, the study reaches its budget, and the files can be joined."""
    files = [tmp_path / f"machine-{i}.db" for i in range(4)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(file), server.url, sampler, "0" if i else "4"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i, file in enumerate(files)
    ]  # fmt: skip
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        victim = workers[0]
        begun = [victim.stdout.readline().strip() for _ in range(4)]
        os.kill(victim.pid, signal.SIGKILL)  # while it tries the fourth
        victim.wait()
        outs = [worker.communicate(timeout=120)[0] for worker in workers[1:]]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL, 0, 0, 0]

    found = trials(storage)
    complete, lost = by_state(found, "COMPLETE"), by_state(found, "FAIL")
    assert len(complete) == len(set(complete)) == TRIALS
    assert lost == begun[3:], "what the victim was trying, and nothing else"
    assert len(found) == TRIALS + 1
    assert lost[0] in complete, "and another worker tried it"

    evaluated = begun + [line for out in outs for line in out.splitlines() if not line.startswith("winner")]
    assert sorted(evaluated) == sorted([*complete, *lost])
    assert all(len(out.splitlines()) > 5 for out in outs), "each had its share"
    values = {trial.user_attrs["key"]: trial.value for trial in found if trial.value is not None}
    for out in outs:
        winner, *counts = out.splitlines()[-1].removeprefix("winner ").rsplit(" ", 3)
        assert values[winner] == min(values.values()), "whoever measured it"
        assert int(counts[0]) == TRIALS == int(counts[1]) + int(counts[2])

    with db.open(tmp_path / "all.db") as joined:
        for file in files:
            joined.merge(file)
        rows = [row for row in joined.trials() if row["phase"] == "search"]
        keys = [Candidate(r["path"], kernels.from_dict(r["config"]) if r["config"] else None).key for r in rows]
        assert sorted(k for k, r in zip(keys, rows, strict=True) if r["state"] == "complete") == sorted(complete)
        [best] = joined.best()
        assert best["time_us"] == pytest.approx(min(values.values()))


def test_a_second_machine_adds_nothing_to_a_finished_study(storage):
    with db.open(":memory:") as one, db.open(":memory:") as two:
        [first] = tuner(one, storage, 12).run([PROBLEM]).problems
        [second] = tuner(two, storage, 12).run([PROBLEM]).problems
        assert (first.new_trials, first.elsewhere, second.new_trials, second.elsewhere) == (12, 0, 0, 12)
        assert second.winner.candidate == first.winner.candidate
        assert [row["phase"] for row in two.trials() if row["phase"] == "search"] == []
        assert len(two.best()) == 1, "but it has looked at the finalists itself, so its own file is of use"
        again = tuner(one, storage, 12).run([PROBLEM])
        assert (again.new_trials, again.problems[0].resumed) == (0, True)
        more = tuner(two, storage, 20).run([PROBLEM])
        assert more.new_trials == 8
    assert len({trial.user_attrs["key"] for trial in trials(storage)}) == len(trials(storage)) == 20


def test_what_was_tried_alone_is_not_tried_again(storage):
    with db.open(":memory:") as one, db.open(":memory:") as two:
        tuner(one, None, 10).run([PROBLEM])
        tuner(one, storage, 12).run([PROBLEM])
        assert len(trials(storage)) == 12
        assert tuner(two, storage, 12).run([PROBLEM]).new_trials == 0


def test_failures_are_shared_with_their_reason(storage):
    broken = Space(PROBLEM, DEVICE).fused[1]

    def times(candidate, problem):
        if candidate == broken:
            raise RuntimeError("an illegal memory access was encountered")
        return steady(candidate, problem)

    with db.open(":memory:") as one, db.open(":memory:") as two:
        tuner(one, storage, 20, "sweep", times=times).run([PROBLEM])
        [second] = tuner(two, storage, 20, "sweep").run([PROBLEM]).problems
    assert second.states["failed"] == 1
    [trial] = [trial for trial in trials(storage) if trial.state.name == "FAIL"]
    assert trial.user_attrs["key"] == broken.key
    assert "illegal memory access" in trial.user_attrs["outcome"]["reason"]


def test_what_a_hot_gpu_could_not_time_is_left_to_a_cooler_one(storage):
    with db.open(":memory:") as one, db.open(":memory:") as two:
        hot = tuner(one, storage, 8)
        hot.objective.throttled = lambda taken: taken > 25
        with contextlib.suppress(TuningError):
            hot.run([PROBLEM])
        assert 0 < len(by_state(trials(storage), "COMPLETE")) < 8
        [result] = tuner(two, storage, 20).run([PROBLEM]).problems
    assert result.trials == 20
    assert result.states["failed"] <= 20 - result.states["complete"]


def test_ctrl_c_gives_the_claim_back_at_once(storage):
    class Impatient(FakeDevice):
        def evaluate(self, candidate, problem):
            if len(self.measured) == 5:
                raise KeyboardInterrupt
            return super().evaluate(candidate, problem)

    with db.open(":memory:") as one, db.open(":memory:") as two:
        first = tuner(one, storage, 12)
        first.objective = Impatient(DEVICE, steady, search=QUICK, final=QUICK)
        assert first.run([PROBLEM]).interrupted
        assert [len(by_state(trials(storage), state)) for state in ("COMPLETE", "FAIL", "RUNNING")] == [5, 1, 0]
        started = time.monotonic()
        [second] = tuner(two, storage, 12).run([PROBLEM]).problems
        assert time.monotonic() - started < GRACE
    assert second.trials == 12
    assert len(set(by_state(trials(storage), "COMPLETE"))) == 12


def study_of(storage, store):
    return storage.study(DEVICE, PROBLEM, "measured", store.environment)


def quietly(entries):
    del entries


def test_a_candidate_that_is_lost_twice_is_not_tried_a_third_time(storage, store):
    study = study_of(storage, store)
    first, second = Space(PROBLEM, DEVICE).fused[:2]
    for _ in range(shared.LOSSES):
        with study.claim(10, quietly, lambda: first) as claim:
            assert claim.candidate == first
    with study.claim(10, quietly, lambda: second) as claim:
        assert claim.candidate == second
        assert claim.finish(Outcome("complete", "measured", time_us=3.0))
    [lost, done] = study.read()
    assert (lost.candidate, lost.outcome.state) == (first, "failed")
    assert "lost" in lost.outcome.reason
    assert (done.candidate, done.outcome.time_us) == (second, 3.0)


def test_a_claim_is_alive_as_long_as_its_heart_beats(storage, store):
    study = study_of(storage, store)
    first, second = Space(PROBLEM, DEVICE).fused[:2]
    with study.claim(10, quietly, lambda: first) as claim:
        time.sleep(GRACE + 1.5)
        with study.claim(10, quietly, lambda: second) as other:
            assert other.candidate == second
            assert other.finish(Outcome("complete", "measured", time_us=2.0))
        assert claim.finish(Outcome("complete", "measured", time_us=1.0))


def test_what_comes_too_late_is_left_out(storage, store):
    """A worker that was cut off for longer than the grace period finds its candidate given away."""
    study = study_of(storage, store)
    first = Space(PROBLEM, DEVICE).fused[0]
    late = study.claim(10, quietly, lambda: first)  # never entered: no heartbeat
    time.sleep(GRACE + 1)
    with study.claim(10, quietly, lambda: None) as claim:
        assert claim.candidate == first
        assert not late.finish(Outcome("complete", "measured", time_us=9.0))
        assert claim.finish(Outcome("complete", "measured", time_us=1.0))
    assert [entry.outcome.time_us for entry in study.read()] == [1.0]


def test_a_claim_written_down_by_a_worker_that_died_is_taken_over(storage, store, monkeypatch):
    study = study_of(storage, store)
    first = Space(PROBLEM, DEVICE).fused[0]

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(study), "_begin", dies)
        with pytest.raises(KeyboardInterrupt):
            study.claim(10, quietly, lambda: first)
    with study.claim(10, quietly, lambda: pytest.fail("something is written down")) as claim:
        assert claim.candidate == first
        claim.finish(Outcome("complete", "measured", time_us=1.0))
    assert len(trials(storage)) == 1


def test_the_budget_is_the_studys(storage, store):
    study = study_of(storage, store)
    one, two, three = Space(PROBLEM, DEVICE).fused[:3]
    with study.claim(2, quietly, lambda: one) as first, study.claim(2, quietly, lambda: two) as second:
        assert study.claim(2, quietly, lambda: three) is None
        assert study.running == 2
        for claim in (first, second):
            claim.finish(Outcome("complete", "measured", time_us=1.0))
    assert study.claim(2, quietly, lambda: three) is None
    assert study.running == 0


def test_everything_that_makes_trials_comparable_is_in_the_identity():
    """e6, e8: vary each field, and it is another study."""
    here = Environment("13.0", "13.0", "library")
    names = {shared.study_name(DEVICE, shared.identity(DEVICE, PROBLEM, "measured", here))}
    problems = [
        dataclasses.replace(PROBLEM, m=32), dataclasses.replace(PROBLEM, n=1024), dataclasses.replace(PROBLEM, k=1024),
        dataclasses.replace(PROBLEM, group_size=64), dataclasses.replace(PROBLEM, symmetric=False),
        dataclasses.replace(PROBLEM, dtype="bfloat16"), dataclasses.replace(PROBLEM, scale_dtype="bfloat16"),
        kernels.Problem("w8a8-int8", 16, 512, 512, -1),
    ]  # fmt: skip
    cards = [
        devices.get("a100-sxm"), dataclasses.replace(DEVICE, sms=64), dataclasses.replace(DEVICE, l2_bytes=2**20),
        dataclasses.replace(DEVICE, memory_bytes=2**33), dataclasses.replace(DEVICE, dram_gbps=500.0),
    ]  # fmt: skip
    elsewhere = [
        dataclasses.replace(here, driver_version="12.9"), dataclasses.replace(here, nvrtc_version="13.1"),
        dataclasses.replace(here, library="another"),
    ]  # fmt: skip
    every = [
        *((DEVICE, problem, "measured", here) for problem in problems),
        *((card, PROBLEM, "measured", here) for card in cards),
        *((DEVICE, PROBLEM, "measured", other) for other in elsewhere),
        (DEVICE, PROBLEM, "predicted", here),
    ]
    names |= {shared.study_name(arguments[0], shared.identity(*arguments)) for arguments in every}
    assert len(names) == 1 + len(every)
    same = (
        dataclasses.replace(DEVICE, ordinal=1),
        PROBLEM,
        "measured",
        dataclasses.replace(here, driver_version="13.2"),
    )
    assert shared.study_name(DEVICE, shared.identity(*same)) in names, "another card of the kind, a minor driver"


def test_a_server_that_restarts_is_waited_for(storage, store, server):
    study = study_of(storage, store)
    first, second = Space(PROBLEM, DEVICE).fused[:2]
    with study.claim(10, quietly, lambda: first) as claim:
        server.stop()
        server.start()
        assert claim.finish(Outcome("complete", "measured", time_us=1.0))
    server.stop()
    server.start()
    with study.claim(10, quietly, lambda: second) as claim:
        assert claim.candidate == second


def test_a_server_that_is_gone_ends_the_run_and_keeps_what_is_done(server, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "PATIENCE_SECONDS", (0.1,))
    opened = shared.Storage(server.url, HEARTBEAT, GRACE)

    class Gone(Silent):
        count = 0

        def trial(self, problem, candidate, outcome):
            self.count += 1
            if self.count == 3:
                server.stop()

    unseen = PROBLEM.with_m(32)
    with db.open(tmp_path / "tuning.db") as store:
        try:
            with pytest.raises(DatabaseError, match=r"shared study in postgresql.*127\.0\.0\.1") as caught:
                tuner(store, opened, 12, progress=Gone()).run([unseen])
        finally:
            server.start()
        assert "sesame" not in str(caught.value)
        assert len(store.trials()) == 3
        assert [study["state"] for study in store.studies()] == ["failed"]
        assert tuner(store, opened, 12).run([unseen]).new_trials == 9
    opened.close()


def test_several_workers_make_the_tables_at_once(server):
    """Optuna alone fails here: PostgreSQL lets one of two processes that make a table fail."""
    import sqlalchemy

    url = shared.checked_url(server.url)
    admin = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT", connect_args={"client_encoding": "utf8"})
    with admin.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE DATABASE fresh"))
    admin.dispose()
    url = server.url.replace("/postgres", "/fresh")
    program = f"from cupyq.tuner.shared import Storage; Storage({url!r}).close()"
    workers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [worker.wait(120) for worker in workers] == [0] * 4


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:///shared.db", ("SQLite", "several writers", "postgresql://")),
        ("sqlite+pysqlite:///shared.db", ("SQLite",)),
        ("mysql://me@host/db", ("mysql", "postgresql://")),
        ("postgresql", ("postgresql://",)),
        ("shared.db", ("shared.db", "postgresql://")),
        ("postgresql://me@host:port/db", ("postgresql://",)),
        ("", ("postgresql://",)),
    ],
)
def test_what_is_no_postgresql_is_refused(url, words):
    with pytest.raises(ArgumentError) as caught:
        shared.Storage(url)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("gone", [{"psycopg", "psycopg2"}, {"sqlalchemy"}])
def test_what_is_missing_is_named_with_the_command_that_mends_it(monkeypatch, gone):
    found = shared.importlib.util.find_spec
    monkeypatch.setattr(shared.importlib.util, "find_spec", lambda name: None if name in gone else found(name))
    with pytest.raises(NotInstalled, match=r'pip install "cupyq\[postgresql\]"') as caught:
        shared.checked_url("postgresql://me@host/db")
    assert sorted(gone)[0] in str(caught.value)


def test_plain_urls_get_the_driver_and_others_keep_theirs():
    assert shared.checked_url("postgresql://me@host/db") == "postgresql+psycopg://me@host/db"
    assert shared.checked_url("postgres://me@host/db") == "postgresql+psycopg://me@host/db"
    assert shared.checked_url("postgresql+psycopg://me@host/db?sslmode=require").endswith("?sslmode=require")


def command(tmp_path, name, *more):
    return tune.main([
        "--device", "rtx-4090", "--shapes", "384x384", "--batches", "16", "--trials", "6",
        "--db", str(tmp_path / name), *more,
    ])  # fmt: skip


def test_the_command_shares(server, storage, tmp_path, capsys):
    del storage  # only to begin with no study
    assert command(tmp_path, "one.db", "--storage", server.url) == 0
    assert "6 new trials" in capsys.readouterr().out
    assert command(tmp_path, "two.db", "--storage", server.url) == 0
    said = capsys.readouterr().out
    assert "0 new trials" in said
    assert "6 elsewhere" in said
    for name in ("one.db", "two.db"):
        with db.open(tmp_path / name, readonly=True) as store:
            assert len(store.best()) == 1
            assert "sesame" not in str(store.studies())


def test_the_command_says_what_is_wrong_with_the_storage(tmp_path, capsys):
    assert command(tmp_path, "one.db", "--storage", "sqlite:///x.db") == 2
    nobody = f"postgresql://me:sesame@127.0.0.1:{postgresql.free_port()}/db"
    assert command(tmp_path, "one.db", "--storage", nobody) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2
    assert "several writers" in err
    assert "me:***@127.0.0.1" in err
    assert "sesame" not in err
    assert not (tmp_path / "one.db").exists()
