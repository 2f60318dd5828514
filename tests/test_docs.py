"""Documentation is tested: transcripts print what they say, links lead somewhere, make targets exist.

Run as a program it writes what the transcripts print now into the pages: `make docs`, then read the diff.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
SOURCES = {"cupyq": "cupyq", "kernels_cu": "cupyq.kernels_cu", "tuner": "cupyq.tuner", "db": "cupyq.db"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?<![\w/])make ((?:[a-z][a-z-]*\s?)+)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def transcript(page: Path) -> str:
    """Return the page's `>>>` blocks, each at the line where it stands, so that a failure names the line."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        if ">>> " in block.group(2):
            start = text.count("\n", 0, block.start(2))
            lines[start:] = keep_blank_lines(block.group(2).splitlines()) + lines[start + block.group(2).count("\n") :]
    return "\n".join(lines)


def keep_blank_lines(lines: list[str]) -> list[str]:
    """Mark blank lines inside an output the way doctest wants them, so that pages can show outputs as they are."""
    kept = []
    following = ">>> "  # the next line that is not blank
    for line in reversed(lines):
        kept.append(line if line.strip() or following.startswith(">>> ") else "<BLANKLINE>")
        following = line if line.strip() else following
    return kept[::-1]


def run_doctest(test: doctest.DocTest) -> None:
    report: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.DocTestRunner(optionflags=options, verbose=False).run(test, out=report.append)
    assert not failed, "".join(report)


class _Renewer(doctest.DocTestRunner):
    """Keeps what failing examples print instead of reporting it."""

    def __init__(self) -> None:
        super().__init__(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        self.changed: list[tuple[doctest.Example, str]] = []

    def report_failure(self, out: object, test: object, example: doctest.Example, got: str) -> None:
        self.changed.append((example, got))


def renew(page: Path) -> int:
    """Write the outputs that changed into the page, and return how many there were. An exception stays an error."""
    runner = _Renewer()
    runner.run(doctest.DocTestParser().get_doctest(transcript(page), {}, page.name, str(page), 0))
    lines = page.read_text(encoding="utf-8").split("\n")
    for example, got in reversed(runner.changed):  # from the end, so that line numbers stay right
        start = example.lineno + example.source.count("\n")
        lines[start : start + example.want.count("\n")] = [line.rstrip() for line in got.splitlines()]
    page.write_text("\n".join(lines), encoding="utf-8")
    return len(runner.changed)


@pytest.fixture(autouse=True)
def without_shipped_presets():
    """Hide nothing: transcripts show what users see, presets included."""


with_transcripts = [p for p in PAGES if ">>> " in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", with_transcripts, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_transcripts(page, tmp_path, monkeypatch):
    test = doctest.DocTestParser().get_doctest(transcript(page), {}, page.name, str(page), 0)
    assert test.examples, "a prompt outside a fenced block is not run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
    run_doctest(test)


def modules_with_examples() -> list[str]:
    found = []
    for folder, package in SOURCES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            docstrings = (
                ast.get_docstring(node) or ""
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            )
            if any(">>> " in text for text in docstrings):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *(p for p in parts if p != "__init__")]))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPYQ_DB", str(tmp_path / "tuning.db"))
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        if test.examples:
            run_doctest(test)


def test_an_output_with_a_blank_line_is_one_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\n>>> print('a\\n\\nb')\na\n\nb\n\n>>> 1\n1\n\n```\n\n```python\n>>> 2\n3\n```\n")
    [first, second, third] = doctest.DocTestParser().get_examples(transcript(page))
    assert (first.want, second.want, third.want) == ("a\n<BLANKLINE>\nb\n", "1\n", "3\n")
    assert [first.lineno, second.lineno, third.lineno] == [3, 8, 14]
    with pytest.raises(AssertionError, match="Expected"):
        run_doctest(doctest.DocTest([third], {}, "page", str(page), 0, None))


def test_a_page_is_renewed_in_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n```python\n>>> print('x\\n\\ny')\nold\n>>> 2\n3\n>>> 4\n4\n\n```\nz\n")
    assert renew(page) == 2
    assert page.read_text() == "a\n```python\n>>> print('x\\n\\ny')\nx\n\ny\n>>> 2\n2\n>>> 4\n4\n\n```\nz\n"
    assert renew(page) == 0


@pages
def test_links_lead_somewhere(page):
    targets = [t for t in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in t and not t.startswith("#")]
    missing = [t for t in targets if not (page.parent / t.split("#")[0]).exists()]
    assert not missing


@pages
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`([^`\n]+)`|^((?:\$ )?make .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    named = {word for pair in code for part in pair for words in MAKE.findall(part) for word in words.split()}
    assert named <= targets, f"no such target: {sorted(named - targets)}"


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for each in with_transcripts:
            os.environ["CUPYQ_DB"] = str(Path(folder) / f"{each.stem}.db")
            if count := renew(each):
                print(f"{each.relative_to(ROOT)}: {count} outputs changed; read the diff")
