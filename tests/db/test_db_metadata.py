"""Datasette's metadata describes the tables and columns that there are, and Datasette reads both."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import resources

import pytest
from db_values import HERE, adder

import cupyq.db

METADATA = resources.files("cupyq.db") / "metadata.yml"


def described():
    """Return table -> described columns. The file is read with a parser where there is one."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")
    tables = yaml.safe_load(METADATA.read_text(encoding="utf-8"))["databases"]["tuning"]["tables"]
    return {name: set(table["columns"]) for name, table in tables.items()}


def test_every_table_view_and_column_is_described_and_no_other(fresh_db):
    with fresh_db.reading() as db:
        actual = {table.name: set(table.columns_dict) for table in [*db.tables, *db.views]}
    del actual["_sqlite_migrations"]
    assert described() == actual


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


@pytest.fixture
def datasette(tmp_path):
    if importlib.util.find_spec("datasette") is None:
        pytest.skip("datasette is not installed (pip install datasette)")
    with cupyq.db.open(tmp_path / "tuning.db", environment=HERE) as store:
        adder(store)(10.0)
        adder(store)(40.0, path="fp16", config=None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "datasette",
        str(tmp_path / "tuning.db"),
        "--metadata",
        str(METADATA),
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()


def test_datasette_serves_best_with_its_descriptions(datasette):
    address, server = datasette
    deadline = time.monotonic() + 60
    while True:
        try:
            page = get(f"{address}/tuning/best")
            break
        except OSError:
            assert server.poll() is None, server.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert "One row per device, op, dtype" in page
    assert "Largest error against the float64 reference" in page
    (row,) = json.loads(get(f"{address}/tuning/best.json?_shape=array"))
    assert (row["device"], row["time_us"], row["speedup_vs_fp16"], row["stale"]) == ("h100-sxm", 10.0, 4.0, 0)
