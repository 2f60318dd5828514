"""A fresh database for each test, with an environment that does not depend on the machine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # db_values, whatever the import mode

from db_values import HERE, adder

import cupyq.db


@pytest.fixture
def fresh_db(tmp_path):
    # Without the presets: what ships must not decide what a test finds.
    with cupyq.db.open(tmp_path / "fresh.db", environment=HERE, presets=False) as store:
        yield store


@pytest.fixture
def add(fresh_db):
    """Add a usable trial to the fresh database; keyword arguments replace its fields."""
    return adder(fresh_db)
