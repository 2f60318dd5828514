"""Reports on a tuning database: one self-contained HTML page, its facts as JSON, and PNG plots for papers."""

from __future__ import annotations

from cupyq.report.data import gather
from cupyq.report.page import render, write

__all__ = ["gather", "render", "write"]
