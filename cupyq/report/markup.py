"""HTML and SVG from Python values: whatever is not `Safe` is escaped, so that text from a database stays text."""

from __future__ import annotations

import html
import json
from typing import Any

_VOID = {"br", "circle", "hr", "input", "line", "link", "meta", "path", "rect", "wbr"}
_SVG_VOID = {"circle", "line", "path", "rect"}


class Safe(str):
    """Markup that `tag` made. Never made from text that came from elsewhere."""

    __slots__ = ()


def tag(name: str, *children: Any, **attributes: Any) -> Safe:
    """Return an element; children and attribute values are escaped unless they are `Safe`, None and False left out.

    `_` in an attribute's name stands for `-`, a trailing one is dropped (`class_`); True gives an attribute no value.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID and not children:
        return Safe(f"<{name}{written}{'/' if name in _SVG_VOID else ''}>")
    return Safe(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Any) -> Safe:
    """Return children one after another, each escaped unless `Safe`; lists are flattened, None left out."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(*child))
        elif child is not None:
            parts.append(child if isinstance(child, Safe) else html.escape(str(child)))
    return Safe("".join(parts))


def embedded(facts: Any) -> Safe:
    """Return JSON that is safe inside a script element: no `<`, `>` or `&` can end or open anything there."""
    written = json.dumps(facts, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return Safe(written)
