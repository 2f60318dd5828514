"""The file: many writers, read-only places, damage, strangers, older and newer schemas."""

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import warnings

import pytest
from db_values import H100, HERE, PROBLEM, adder

import cupyq.db
from cupyq.db import connect, migrations, place
from cupyq.errors import DatabaseError, SchemaTooNew


def _write(path, writer, rows, failures):
    try:
        with cupyq.db.open(path, environment=HERE) as store:
            add = adder(store)
            for i in range(rows):
                # 2.0 is lost from every writer's trials when a transaction is, and ids and labels race too.
                add(1.0 + i, tile=writer, problem=PROBLEM.with_m(1 + (writer + i) % 40))
    except Exception as error:  # noqa: BLE001  (whatever it is, the parent must see it)
        failures.put(f"writer {writer}: {error!r}")


def test_16_processes_that_write_200_rows_each_lose_none(tmp_path):
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    path = tmp_path / "shared.db"  # does not exist yet: they race to make it, too
    writers = [context.Process(target=_write, args=(path, i, 200, failures)) for i in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=300)
    assert [writer.exitcode for writer in writers] == [0] * 16
    assert failures.empty(), failures.get()
    with cupyq.db.open(path, readonly=True, environment=HERE) as store:
        rows = [(row["config"]["tile"], row["time_us"]) for row in store.trials()]
        assert sorted(rows) == [(writer, 1.0 + i) for writer in range(16) for i in range(200)]
        assert len(store.devices()) == 1
        with store.reading() as db:
            assert db.table("problem").count == 40
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_killed_writer_loses_at_most_the_running_trial(tmp_path):
    script = (
        "import sys, os, signal\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from db_values import HERE, H100, PROBLEM, adder\n"
        "import cupyq.db\n"
        "store = cupyq.db.open(sys.argv[1], environment=HERE)\n"
        "study = store.start_study('s', H100, PROBLEM)\n"
        "for i in range(5): adder(store)(1.0 + i, study=study)\n"
        "store.start_trial(cupyq.db.Trial(device=H100, problem=PROBLEM, source='measured', study=study))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "killed.db"
    child = subprocess.run([sys.executable, "-c", script, str(path), os.path.dirname(__file__)], check=False)
    assert child.returncode == -9
    with cupyq.db.open(path, environment=HERE) as store:
        tried = store.configs_tried(store.start_study("s", H100, PROBLEM))
        assert [row["state"] for row in tried] == ["complete"] * 5 + ["failed"]
        assert [row["time_us"] for row in tried] == [1.0, 2.0, 3.0, 4.0, 5.0, None]


def test_a_reader_does_not_wait_for_a_writer(fresh_db, add):
    add(1.0)
    with fresh_db.writing() as db:
        db.execute("UPDATE trial SET time_us = 2.0")
        with cupyq.db.open(fresh_db.path, readonly=True, environment=HERE) as reader:
            assert reader.best()[0]["time_us"] == 1.0


def test_a_writer_that_waits_too_long_says_so(fresh_db, monkeypatch):
    monkeypatch.setattr(place, "BUSY_SECONDS", 0.1)
    with (
        cupyq.db.open(fresh_db.path, environment=HERE) as other,
        fresh_db.writing(),
        pytest.raises(DatabaseError, match="locked by another process"),
    ):
        other.declare()


def test_the_file_is_in_wal_mode_unless_on_a_network(tmp_path, monkeypatch):
    def journal(name):
        with cupyq.db.open(tmp_path / name, environment=HERE) as store, store.reading() as db:
            return db.journal_mode

    assert journal("local.db") == "wal"
    monkeypatch.setattr(connect, "_file_system", lambda path: "nfs4")
    assert journal("remote.db") == "delete"


@pytest.mark.skipif(sys.platform != "linux", reason="the type of a file system is read from /proc")
def test_the_file_system_is_that_of_the_deepest_mount(tmp_path):
    from pathlib import Path

    assert connect._file_system(Path("/proc/x.db")) == "proc"
    assert connect._file_system(tmp_path / "x.db") not in {"", "proc"}


@pytest.mark.parametrize("name", ["with space", "Größe-数据", "50%20", "a?b", "a#b", "mode=ro&x"])
def test_any_folder_name_works(tmp_path, name):
    path = tmp_path / name / "t.db"
    with cupyq.db.open(path, environment=HERE) as store:
        adder(store)(3.0)
    assert [child.name for child in (tmp_path / name).iterdir()] == ["t.db"]
    with cupyq.db.open(path, readonly=True, environment=HERE) as store:
        assert len(store.best()) == 1


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "mine.db"))
    assert cupyq.db.default_path() == tmp_path / "mine.db"
    monkeypatch.setenv("CUPYQ_DB", "~/mine.db")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cupyq.db.default_path() == tmp_path / "mine.db"
    monkeypatch.setenv("CUPYQ_DB", " ")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if sys.platform == "linux":
        assert cupyq.db.default_path() == tmp_path / "data" / "cupyq" / "tuning.db"
    cupyq.db.open(environment=HERE).close()
    assert cupyq.db.default_path().is_file()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatabaseError, match=r"folder .* cannot be made.*CUPYQ_DB"):
        cupyq.db.open(tmp_path / "file" / "t.db", environment=HERE)


# Damage


def _damaged(path, kind):
    with cupyq.db.open(path, environment=HERE) as store:
        for _ in range(200):
            adder(store)(1.0, samples_us=[1.0] * 100)
    content = path.read_bytes()
    changed = {
        "text": b"this is no database, but a note that someone keeps here\n" * 40,
        "truncated": content[: len(content) // 2],
        "header only": content[:100],
        "zeroed pages": content[:4096] + bytes(len(content) - 4096),
    }[kind]
    path.write_bytes(changed)
    return changed


def _use(path, readonly):
    with cupyq.db.open(path, readonly, environment=HERE) as store:
        if not readonly:
            adder(store)(1.0)
        store.trials()


@pytest.mark.parametrize("kind", ["text", "truncated", "header only", "zeroed pages"])
@pytest.mark.parametrize("readonly", [True, False])
def test_a_damaged_file_is_an_error_and_is_never_overwritten(tmp_path, kind, readonly):
    path = tmp_path / "damaged.db"
    content = _damaged(path, kind)
    with pytest.raises(DatabaseError, match=r"damaged\.db"):
        _use(path, readonly)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["text", "header only"])
def test_a_damaged_file_is_one_warning_for_the_dispatcher(tmp_path, kind):
    path = tmp_path / "damaged.db"
    content = _damaged(path, kind)
    with pytest.warns(cupyq.db.DatabaseWarning, match=r"damaged\.db.*default kernels"):
        assert cupyq.db.open_or_none(path, environment=HERE) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cupyq.db.open_or_none(path, environment=HERE) is None
    assert path.read_bytes() == content


def test_no_file_is_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cupyq.db.open_or_none(tmp_path / "none.db") is None
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(DatabaseError, match="no database at"):
        cupyq.db.open(tmp_path / "none.db", readonly=True)


def test_an_empty_file_is_an_empty_database(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with cupyq.db.open(path, readonly=True, environment=HERE) as store:
        assert store.best() == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize("readonly", [True, False])
def test_a_database_of_something_else_is_left_alone(tmp_path, readonly):
    path = tmp_path / "theirs.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipe (title TEXT)")
    connection.commit()
    connection.close()
    content = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"something else .*recipe"):
        cupyq.db.open(path, readonly, environment=HERE)
    assert path.read_bytes() == content


# Read-only places


AS_NOBODY = """
import os, sys
sys.path[:0] = [sys.argv[2]]
import cupyq.db
import cupyq.db.store
from db_values import H100, HERE, PROBLEM
os.setuid(65534)  # after the imports: nobody may not be allowed to read Python's own files
if sys.argv[3] == "write":
    try:
        cupyq.db.open(sys.argv[1], environment=HERE).declare()
    except cupyq.db.store.DatabaseError as error:
        print(error)
else:
    with cupyq.db.open(sys.argv[1], readonly=True, environment=HERE) as store:
        print(len(store.trials()), len(store.best()), store.lookup(H100, PROBLEM).time_us)
    with cupyq.db.open_or_none(sys.argv[1], environment=HERE) as reader:
        print(reader.lookup(H100, PROBLEM).time_us)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users on this system")
@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o444, 0o555), (0o444, 0o755), (0o644, 0o555)])
def test_a_read_only_file_and_folder(tmp_path, add, fresh_db, file_mode, folder_mode, action):
    add(1.0)
    fresh_db.close()
    path = tmp_path / "fresh.db"
    path.chmod(file_mode)
    tmp_path.chmod(folder_mode)
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)  # pytest keeps its folders to itself; nobody has to get in
    script, arguments = AS_NOBODY, [str(path), os.path.dirname(__file__), action]
    if os.geteuid() != 0:
        script = script.replace("os.setuid(65534)", "pass")  # chmod stops this user; only root has to step down first
    child = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    tmp_path.chmod(0o755)
    assert child.stderr == ""
    if action == "read":
        assert child.stdout.split() == ["1", "1", "1.0", "1.0"]
    else:
        assert "fresh.db cannot be" in child.stdout


def test_unfolded_rows_in_the_log_of_a_file_that_is_open_elsewhere_are_read(fresh_db, add):
    add(1.0)
    assert (fresh_db.path.parent / "fresh.db-wal").stat().st_size > 0
    with cupyq.db.open(fresh_db.path, readonly=True, environment=HERE) as store:
        assert len(store.best()) == 1


# Schema


def test_the_schema_version_counts_the_migrations():
    from sqlite_utils import Database

    assert len(migrations.migrations.pending(Database(memory=True))) == migrations.SCHEMA_VERSION


def test_meta_says_which_schema(fresh_db):
    with fresh_db.reading() as db:
        meta = {row["key"]: row["value"] for row in db.table("meta").rows}
    assert meta.keys() == {"schema_version", "created_at"}
    assert meta["schema_version"] == str(migrations.SCHEMA_VERSION)


def _older(path):
    """Make a file as the first schema left it: tables, no views."""
    from sqlite_utils import Database

    db = Database(path)
    migrations.migrations.apply(db, stop_before="ranking")
    db.execute("INSERT INTO meta VALUES ('schema_version', '1')")
    db.execute("PRAGMA user_version = 1")
    db.close()


def test_an_older_file_is_brought_up_to_date(tmp_path):
    _older(tmp_path / "old.db")
    with cupyq.db.open(tmp_path / "old.db", environment=HERE) as store:
        adder(store)(1.0)
        assert len(store.best()) == 1
    assert migrations.check(connect.connect(tmp_path / "old.db", readonly=True), "") == migrations.SCHEMA_VERSION


def test_an_older_file_is_read_without_being_changed(tmp_path):
    _older(tmp_path / "old.db")
    content = (tmp_path / "old.db").read_bytes()
    with cupyq.db.open(tmp_path / "old.db", readonly=True, environment=HERE) as store:
        assert store.best() == []
    assert (tmp_path / "old.db").read_bytes() == content


def test_an_older_file_with_rows_answers_the_dispatcher_without_being_changed(tmp_path):
    path = tmp_path / "old.db"
    _older(path)
    with cupyq.db.open(path, environment=HERE) as store:
        adder(store)(7.0)
        with store.writing() as db:
            # As the first schema had it: tables have not changed since, views and conflicts came.
            db.execute("DELETE FROM _sqlite_migrations WHERE name <> 'tables'")
            db.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
            for drop in ("VIEW best", "VIEW eligible", "TABLE conflict"):
                db.execute(f"DROP {drop}")
            db.execute("PRAGMA user_version = 1")
    content = path.read_bytes()
    with cupyq.db.open_or_none(path, environment=HERE) as reader:
        assert reader.lookup(H100, PROBLEM).time_us == 7.0
        assert [row.time_us for row in reader.nearest(H100, PROBLEM.with_m(32))] == [7.0]
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["truncated", "zeroed pages"])
def test_damage_that_shows_only_in_a_look_up_is_an_error_that_names_the_file(tmp_path, kind):
    path = tmp_path / "damaged.db"
    content = _damaged(path, kind)
    with pytest.raises(DatabaseError, match=r"damaged\.db"), cupyq.db.Reader(path, HERE) as reader:
        reader.lookup(H100, PROBLEM)
    assert path.read_bytes() == content


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_reader_survives_a_fork_and_threads(fresh_db, add):
    add(3.0)
    reader = cupyq.db.Reader(fresh_db.path, HERE)
    context = multiprocessing.get_context("fork")
    times = context.Queue()

    def ask():
        times.put(reader.lookup(H100, PROBLEM).time_us)

    children = [context.Process(target=ask) for _ in range(2)]
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in (*children, *threads):
        each.start()
    found = [times.get(timeout=60) for _ in range(6)]
    for each in (*children, *threads):
        each.join()
    assert found == [3.0] * 6
    reader.close()


def test_a_migration_that_fails_leaves_the_older_file(tmp_path, monkeypatch):
    _older(tmp_path / "old.db")
    monkeypatch.setattr(cupyq.db.views, "BEST", "SELECT nonsense FROM")
    with pytest.raises(DatabaseError):
        cupyq.db.open(tmp_path / "old.db", environment=HERE)
    monkeypatch.undo()
    with cupyq.db.open(tmp_path / "old.db", environment=HERE) as store:
        assert store.best() == []


@pytest.mark.parametrize("readonly", [True, False])
def test_a_newer_schema_is_refused(fresh_db, readonly):
    with fresh_db.writing() as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    with pytest.raises(SchemaTooNew, match=r"schema 99, this cupyq knows up to .*update cupyq"):
        cupyq.db.open(fresh_db.path, readonly, environment=HERE)
    with pytest.warns(cupyq.db.DatabaseWarning, match="schema 99"):
        assert cupyq.db.open_or_none(fresh_db.path, environment=HERE) is None


def test_a_file_that_a_newer_cupyq_moves_on_while_it_is_open_is_not_written(fresh_db, add):
    add(1.0)
    with cupyq.db.open(fresh_db.path, environment=HERE) as newer, newer.writing() as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(SchemaTooNew, match="schema 99"):
        add(2.0)
    assert len(fresh_db.trials()) == 1


def test_memory_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with cupyq.db.open(":memory:", environment=HERE) as store:
        adder(store)(1.0)
        assert len(store.best()) == 1
        assert store.device_id(H100) == 1
    assert list(tmp_path.iterdir()) == []


# A full disk, two versions at once


FULL_DISK = """
import resource, sys
sys.path[:0] = [sys.argv[2]]
import cupyq.db
from db_values import HERE, adder
store = cupyq.db.open(sys.argv[1], environment=HERE)
if sys.argv[3] != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
done = 0
try:
    for i in range(1000):
        adder(store)(1.0 + i, samples_us=[0.5] * 2000)
        done += 1
except cupyq.db.store.DatabaseError as error:
    print(done, error)
"""


def _fill(path, limit):
    command = [sys.executable, "-c", FULL_DISK, str(path), os.path.dirname(__file__), str(limit)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    done, said = child.stdout.split(" ", 1)
    assert 0 < int(done) < 1000
    assert "cannot take more rows" in said
    return int(done)


def _whole(path, rows):
    with cupyq.db.open(path, environment=HERE) as store:
        assert sorted(row["time_us"] for row in store.trials()) == [1.0 + i for i in range(rows)]
        with store.reading() as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        adder(store)(9999.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no RLIMIT_FSIZE on this system")
def test_a_file_that_cannot_grow_keeps_every_row_that_was_written(tmp_path):
    done = _fill(tmp_path / "full.db", 400_000)
    _whole(tmp_path / "full.db", done)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False) if sys.platform == "linux" else None
    if mounted is None or mounted.returncode != 0:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_every_row_that_was_written(small_disk, tmp_path):
    done = _fill(small_disk / "full.db", 0)
    # The disk is still full: reading must work there, and a copy must be whole.
    with cupyq.db.open(small_disk / "full.db", readonly=True, environment=HERE) as store:
        assert len(store.trials()) == done
    for file in small_disk.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    _whole(tmp_path / "full.db", done)


def test_two_versions_that_write_by_turns_lose_nothing_and_each_judges_by_itself(tmp_path):
    import dataclasses

    path = tmp_path / "shared.db"
    newer = dataclasses.replace(
        HERE, library="library-2", source_hash=lambda config, problem: f"v2-{config['tile']}", cupyq_version="0.2.0"
    )
    with (
        cupyq.db.open(path, environment=HERE) as one,
        cupyq.db.open(path, environment=newer) as two,
    ):
        for i in range(10):
            adder(one)(1.0, tile=i, problem=PROBLEM.with_m(1))
            adder(two)(2.0, tile=i, problem=PROBLEM.with_m(64))
        assert len(one.trials()) == len(two.trials()) == 20
        assert {row["band"]: row["stale"] for row in one.best()} == {1: False, 64: True}
        assert {row["band"]: row["stale"] for row in two.best()} == {1: True, 64: False}
        assert [found["cupyq_version"] for found in one.trials(limit=2)] == ["0.2.0", "0.1.0"]
    connection = sqlite3.connect(path)
    stale = dict(connection.execute("SELECT band, stale FROM best"))
    connection.close()
    assert stale == {1: 1, 64: 0}, "other tools see the file as the version that began last does"
