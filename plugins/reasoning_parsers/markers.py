"""What the parsers share: markers that come in pieces, and white space beside them."""

from __future__ import annotations

WHITE_SPACE = " \t\n\r"


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, the whole of it left out."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class BlankEnds:
    """A text without the white space at its start, and without that at its end where a marker follows."""

    def __init__(self) -> None:
        self._begun = False
        self._blank: list[str] = []  # may be at the end

    def push(self, text: str) -> str:
        """What is certain with this piece."""
        if not self._begun:
            text = text.lstrip(WHITE_SPACE)
        core = text.rstrip(WHITE_SPACE)
        if not core:
            self._blank.append(text)
            return ""
        before, self._begun, self._blank = "".join(self._blank), True, [text[len(core) :]]
        return before + core

    def finish(self, text: str) -> str:
        """The last piece, behind which there is no marker."""
        told = self.push(text)
        blank, self._blank = "".join(self._blank), []
        return told + blank
