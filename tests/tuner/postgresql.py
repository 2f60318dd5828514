"""A real PostgreSQL server for the length of a test: its own folder, a port of the kernel's choice on loopback."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def binaries() -> Path:
    """Return the folder of initdb and pg_ctl; skips the test where Debian's package `postgresql` is not there."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    found += [Path(on_path).resolve().parent] if on_path else []
    for folder in found:
        if all((folder / name).exists() for name in ("initdb", "pg_ctl", "postgres")):
            return folder
    pytest.skip("no initdb and pg_ctl in /usr/lib/postgresql/*/bin or on PATH (Debian: apt-get install postgresql)")


def _servant() -> str | None:
    """Return whom the server runs as: PostgreSQL refuses to be root."""
    if os.geteuid() != 0:
        return None
    names = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One server; `url` is what SQLAlchemy and `--storage` take."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._bin = binaries()
        self._user = _servant()
        if self._user is not None:
            shutil.chown(folder, self._user)
        password = folder / "password"
        password.write_text("sesame\n")
        if self._user is not None:
            shutil.chown(password, self._user)
        self._run("initdb", "-D", str(self.data), "-U", "tuner", "-A", "scram-sha-256", f"--pwfile={password}", "-N")
        self.port = 0

    @property
    def url(self) -> str:
        return f"postgresql://tuner:sesame@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self.port = self.port or free_port()
        options = f"-p {self.port} -h 127.0.0.1 -k '{self.folder}' -c fsync=off -c max_connections=60"
        self._run(
            "pg_ctl", "-D", str(self.data), "-l", str(self.folder / "log"), "-o", options, "-w", "-t", "60", "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *arguments], user=self._user, cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "HOME": str(self.folder)},
        )  # fmt: skip
        log = self.folder / "log"
        assert done.returncode == 0, f"{program}: {done.stdout}\n{log.read_text() if log.exists() else ''}"


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Start a server in a folder of its own; stop it and remove the folder, whatever happens."""
    # Not pytest's folder: only root gets into that, and the server is somebody else. Its socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="cupyq-pg-"))
    try:
        server = Server(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
