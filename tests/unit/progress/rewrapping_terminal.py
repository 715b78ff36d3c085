"""A terminal that wraps its lines anew when its width changes, as most of today's do."""

import re

_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class RewrappingTerminal:
    """Lines without a wrap, and where the cursor is among them.

    What a program writes is interpreted at once; `screen` is what a person sees. Only what views
    write is understood; anything else is an error.
    """

    def __init__(self, columns):
        self.columns = columns
        self.lines, self.row, self.offset = [""], 0, 0  # the cursor's line and place within it
        self.wraps = self.shows_cursor = True

    def write(self, text):
        for match in _TOKEN.finditer(text):
            arguments, command, carriage, feed, plain = match.groups()
            if carriage:
                self.offset -= self.offset % self.columns  # beginning of the row, not of the line
            elif feed:
                self._down()
            elif plain:
                self._put(plain)
            else:
                self._control(arguments, command)
        assert "".join(m[0] for m in _TOKEN.finditer(text)) == text
        return len(text)

    def flush(self):
        """Everything is shown already."""

    def isatty(self):
        return True

    def resize(self, columns):
        self.columns = columns

    @property
    def screen(self):
        rows = []
        for line in self.lines:
            parts = [line[i : i + self.columns] for i in range(0, len(line), self.columns)]
            rows += parts or [""]
        return [row.rstrip() for row in rows]

    def _control(self, arguments, command):
        if command == "m":
            return
        if arguments in ("?7", "?25"):
            if arguments == "?7":
                self.wraps = command == "h"
            else:
                self.shows_cursor = command == "h"
        elif command == "A":
            for _ in range(int(arguments or 1)):
                if self.offset >= self.columns:
                    self.offset -= self.columns
                else:
                    self.row -= 1
                    assert self.row >= 0
                    rows = max((len(self.lines[self.row]) - 1) // self.columns, 0)
                    self.offset = rows * self.columns + self.offset % self.columns
        elif (command, arguments) == ("J", ""):
            self.lines[self.row] = self.lines[self.row][: self.offset]
            del self.lines[self.row + 1 :]
        else:
            raise AssertionError(f"unknown: {command!r} with {arguments!r}")

    def _down(self):
        self.row += 1
        self.offset = 0  # the driver of a terminal sends a carriage return with every new line
        if self.row == len(self.lines):
            self.lines.append("")

    def _put(self, text):
        if not self.wraps:
            text = text[: self.columns - self.offset % self.columns]
        line = self.lines[self.row].ljust(self.offset)
        self.lines[self.row] = line[: self.offset] + text + line[self.offset + len(text) :]
        self.offset += len(text)
        if not self.wraps and self.offset % self.columns == 0:
            self.offset -= 1  # the cursor stays on the last cell of the row
