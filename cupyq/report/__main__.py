"""Run the report's command line: `python -m cupyq.report --help`."""

from __future__ import annotations

import sys

from cupyq.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
