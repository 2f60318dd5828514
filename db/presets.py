"""Presets: predictions for common GPUs and layers, shipped as text, read beside the user's file and never into it.

`presets/NAME.jsonl` is for the device of that name in the catalogue; `python -m cupyq.db presets` writes it (see
`making`). Its first line is a header: what it was made from, every config, and every kernel that is, a config with the
hash of the source it stands for. Each further line is one problem without M: its key, and for each band of
`cupyq.bands` the fused kernel and its time and, where that is faster, the dequantizing kernel and the time of its path:

    {"problem":["w4a16",4096,4096,128,true,"float16","float16"],"bands":[[3,5.21],...,[9,80.4,7,71.0]]}

A file is read when its device is first asked about, and of its lines only the one asked for is parsed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyq import bands, devices
from cupyq.errors import DatabaseError

if TYPE_CHECKING:
    from cupyq.db.found import Found

FORMAT = 1
KEY = ("op", "n", "k", "group_size", "symmetric", "dtype", "scale_dtype")
"""Fields of a problem, in the order of a line's key: all but M."""

_ENDING = ".jsonl"


class Row(NamedTuple):
    """One row of a preset: what it holds, for which problem (the fields), and the hash of the kernel's source."""

    found: Found
    problem: dict[str, Any]
    source_hash: str


def folder() -> Path:
    """Return the folder of the presets."""
    return Path(__file__).parent / "presets"


def file_of(name: str) -> Path:
    """Return the file of one device's presets, whether it is there or not."""
    return folder() / f"{name}{_ENDING}"


def names() -> list[str]:
    """Return the names of the devices that presets ship for."""
    return sorted(path.stem for path in folder().glob(f"*{_ENDING}"))


def name_of(spec: Any) -> str:
    """Return the catalogue's name of a device, which is its own where the catalogue does not have it."""
    listed = devices.match(spec) if getattr(spec, "live", False) else None
    return str(spec.name if listed is None else listed.name)


def read(name: str) -> Preset | None:
    """Return the presets of one device, None when there are none; read once a process.

    Raises
    ------
    DatabaseError
        If the file is none of a preset for this device.
    """
    try:
        return _read(file_of(name), name)
    except FileNotFoundError:
        return None


def lookup(
    device: Any, problem: Any, band: int, paths: Sequence[str], generates: Callable[[str, Any, Any], bool]
) -> Found | None:
    """Return the preset for exactly this device, problem and band, None where there is none.

    Parameters
    ----------
    device : DeviceSpec
        A card of this machine is found in the catalogue.
    problem : kernels.Problem
        Its M does not matter.
    band : int
        End of the band.
    paths : sequence of str
        Which paths may answer.
    generates : callable
        (source hash, config, problem) -> whether the library here generates that source; if not, the row is stale.
    """
    shipped = read(name_of(device))
    row = None if shipped is None else shipped.row(problem, band, paths)
    if row is None:
        return None
    if generates(row.source_hash, row.found.config, row.problem):
        return row.found
    return dataclasses.replace(row.found, stale_because="kernel source")


class Alone:
    """The presets, asked like a database where there is none: what `Reader` knows, without SQLite."""

    path = None

    def lookup(
        self, device: Any, problem: Any, band: int | None = None, *, paths: Sequence[str] = ("fused", "dequant")
    ) -> Found | None:
        """Return the preset for exactly this device, problem and band, or None."""
        return lookup(device, problem, band or bands.of(problem.m), paths, self._generates)

    def nearest(self, *_: Any, **__: Any) -> list[Found]:
        """Return nothing: a prediction for another shape is worth no more than one for this shape."""
        return []

    def paths(self, device: Any, problem: Any, band: int | None = None) -> dict[str, Found]:
        """Return the preset of each path that has one."""
        found = {path: self.lookup(device, problem, band, paths=(path,)) for path in ("fused", "dequant")}
        return {path: row for path, row in found.items() if row is not None}

    def close(self) -> None:
        """Nothing is held."""

    def _generates(self, source_hash: str, config: Any, problem: Any) -> bool:
        from cupyq.db.environment import Environment

        generate = Environment.here().source_hash
        return generate is not None and generate(config, problem) == source_hash


@functools.lru_cache(maxsize=64)
def _read(path: Path, name: str) -> Preset:
    found = Preset(name, path.read_text(encoding="utf-8"))
    if found.header.get("device") != name:
        raise DatabaseError(f"preset {name} is for {found.header.get('device')!r}, not for {name}")
    return found


class Preset:
    """The presets of one device.

    Parameters
    ----------
    name : str
        Of the device in the catalogue.
    text : str
        The file.

    Attributes
    ----------
    header : dict
        "preset" (the format), "device", "cupyq", "nvrtc", "made" (digests, see `making`), "configs", "kernels".
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text
        self.header = self._parsed(text.partition("\n")[0], 1)
        if self.header.get("preset") != FORMAT:
            raise DatabaseError(f"preset {name} has format {self.header.get('preset')!r}; {FORMAT} is accepted")
        self.configs: list[dict[str, Any]] = self.header["configs"]
        self.kernels: list[list[Any]] = self.header["kernels"]  # (number of the config, source hash)

    def row(self, problem: Any, band: int, paths: Sequence[str]) -> Row | None:
        """Return the fastest row of a problem at a band (`problem`'s M does not matter) among `paths`, or None."""
        mark = _mark([getattr(problem, field) for field in KEY])
        start = self._text.find(mark)
        if start < 0:
            return None
        line = self._text[start + 1 : self._text.find("\n", start + 1)]
        rows = self._rows(line, self._text.count("\n", 0, start + 1) + 1, band)
        return min((row for row in rows if row.found.path in paths), key=lambda row: row.found.time_us, default=None)

    def rows(self) -> Iterator[Row]:
        """Yield every row, lines in order, bands ascending."""
        for count, line in enumerate(self._text.splitlines()[1:], start=2):
            yield from self._rows(line, count)

    def _rows(self, line: str, count: int, only: int | None = None) -> Iterator[Row]:
        parts = self._parsed(line, count)
        try:
            fields = dict(zip(KEY, parts["problem"], strict=True))
            entries = dict(zip(bands.ends(), parts["bands"], strict=True))
            for band in entries if only is None else (only,):
                for at in range(0, len(entries[band]), 2):
                    yield self._row(fields, band, *entries[band][at : at + 2])
        except (LookupError, TypeError, ValueError) as error:
            raise DatabaseError(f"preset {self.name}, line {count}, is no row of a preset: {error!r}") from error

    def _row(self, fields: dict[str, Any], band: int, kernel: int, time_us: float) -> Row:
        from cupyq.db.found import Found

        number, source_hash = self.kernels[kernel]
        config = dict(self.configs[number])
        if not time_us > 0:
            raise ValueError(f"a time of {time_us} us")
        found = Found(
            path="dequant" if config.get("family") == "dequant" else "fused", config=config, source="predicted",
            stale_because="", distance=0.0, time_us=float(time_us), time_low_us=None, time_high_us=None, error=None,
            **fields, m=band, band=band, device=self.name, uid="", preset=True,
        )  # fmt: skip
        return Row(found, {**fields, "m": band}, source_hash)

    def _parsed(self, line: str, count: int) -> dict[str, Any]:
        try:
            parts = json.loads(line)
            if not isinstance(parts, dict):
                raise ValueError("an object is needed")
            return parts
        except ValueError as error:
            raise DatabaseError(f"preset {self.name}, line {count}, is no JSON object: {error}") from error


def _mark(key: list[Any]) -> str:
    """Return what the line of a problem begins with, the end of the line before it included."""
    return f'\n{{"problem":{_text(key)},'


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class Writing:
    """The text of a preset, put together a problem at a time.

    Parameters
    ----------
    device : str
        Its name in the catalogue.
    facts : mapping
        What else the header says.
    """

    def __init__(self, device: str, facts: Mapping[str, Any]) -> None:
        self.header = {"preset": FORMAT, "device": device, **facts}
        self._configs: dict[str, int] = {}
        self._kernels: dict[tuple[int, str], int] = {}
        self._lines: list[str] = []

    def add(self, problem: Any, entries: Sequence[Sequence[tuple[Mapping[str, Any], str, float]]]) -> None:
        """Add a problem: for each band the (config, source hash, microseconds) of its kernels, the fused one first."""
        numbered = [
            [part for config, source_hash, time_us in entry for part in (self._number(config, source_hash), time_us)]
            for entry in entries
        ]
        key = [getattr(problem, field) for field in KEY]
        self._lines.append(_text({"problem": key, "bands": numbered}))

    def _number(self, config: Mapping[str, Any], source_hash: str) -> int:
        of_config = self._configs.setdefault(_text(config), len(self._configs))
        return self._kernels.setdefault((of_config, source_hash), len(self._kernels))

    def text(self) -> str:
        """Return the whole file."""
        header = {**self.header, "configs": [json.loads(c) for c in self._configs], "kernels": list(self._kernels)}
        return "\n".join([_text(header), *self._lines]) + "\n"
