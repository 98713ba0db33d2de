"""Stop texts: found wherever they lie in the text, across tokens and rounds."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Looks for the first stop text in a text that arrives in pieces.

    Text that may turn out to begin a stop text is held back.

    Args:
        stops: texts of at least one character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._seen = 0  # of what is held back and was looked ahead at, characters already judged
        self.found: str | None = None

    def push(self, text: str, *, ahead: str = "", may_stop: bool = True) -> str:
        """Take in a piece and return what is certain to come before any stop text.

        Where a stop text is complete, `found` is set to the one that begins first (the longest of
        those), and nothing from its start on is ever returned.

        Args:
            text: the piece.
            ahead: what would follow it if the text ended here; only looked at. A tokenizer may
                hold back bytes that are whole already.
            may_stop: whether a stop text that ends in this piece counts.
        """
        text = self._held + text
        # An incomplete character looks like U+FFFD until its last byte comes.
        ahead = ahead.rstrip("\ufffd")
        if may_stop:
            whole = text + ahead
            places = [
                (place, -len(stop), stop)
                for stop in self._stops
                # One that ended before did not count then, and does not now.
                if (place := whole.find(stop, max(self._seen - len(stop) + 1, 0))) >= 0
            ]
            if places:
                start, _, self.found = min(places)
                self._held = ""
                return whole[:start]
        self._held = text[len(text) - self._beginning(text) :]
        self._seen = len(self._held) + len(ahead)
        return text[: len(text) - len(self._held)]

    def finish(self) -> str:
        """Return what was held back, given that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
