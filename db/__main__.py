"""Run the command line of the tuning database: `python -m cupyq.db --help`."""

from cupyq.db.cli import cli

if __name__ == "__main__":
    cli(prog_name="python -m cupyq.db")
