"""What holds for every test: presets that ship must not decide what a test finds."""

import pytest


@pytest.fixture(autouse=True)
def without_shipped_presets(tmp_path_factory, monkeypatch):
    """Hide the presets of the repository: they are made again whenever kernels change, and differ then."""
    monkeypatch.setattr("cupyq.db.presets.folder", lambda: _empty(tmp_path_factory))


def _empty(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "no-presets"
