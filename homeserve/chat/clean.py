"""What a model writes, before a terminal gets it: a control character would be an order to the terminal.

Line ends and tabs stay. Every other control character is shown in caret notation, which is what terminals print for it
themselves; a carriage return goes, and so does what changes the direction of writing, which could make a line look like
another one.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_DELETE, _C1 = 0x7F, 0x80


def cleaned(text: str) -> str:
    return _CONTROL.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code == ord("\r") or code > 0xFF:
        return ""
    if code == _DELETE:
        return "^?"
    return f"^{chr(code + 64)}" if code < _C1 else f"\\x{code:02x}"
