"""Write Python text that a formatter would leave alone; knows nothing of gemsc."""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

WIDTH = 88
INDENT = "    "
CALLED = re.compile(r"[\w)\]}\"'][(]$")  # what stands before arguments
# and before a subscript, or the parentheses around an operation
ALONE = re.compile(r"(?:[\w)\]}\"'][\[]|(?:^|[^\w)\]}\"'])[(])$")


class Writer:
    """Lines of text with indentation."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._level = 0

    @property
    def room(self) -> int:
        """Columns left for text at the present indentation."""
        return WIDTH - len(INDENT) * self._level

    def line(self, text: str = "") -> None:
        """Add one line at the present indentation; nothing is wrapped."""
        self._lines.append((INDENT * self._level + text) if text else "")

    def lines(self, text: str) -> None:
        """Add several lines."""
        for line in text.splitlines():
            self.line(line)

    def docstring(self, text: str) -> None:
        """Add a docstring of one line, cut to fit."""
        limit = self.room - 6
        text = text if len(text) <= limit else f"{text[: limit - 4]} ..."
        self.line(f'"""{text}"""')

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add `head` and indent what follows."""
        self.line(head)
        with self.indented():
            yield

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indent what follows."""
        self._level += 1
        yield
        self._level -= 1

    def call(
        self, head: str, arguments: Sequence[str], tail: str = ")", note: str = ""
    ) -> None:
        """Add `head` + arguments + `tail`, broken as a formatter breaks a call.

        One line if it fits; else the arguments on one line of their own; else one line
        each with a trailing comma, if that means the same. `note` is a trailing
        comment. Head, arguments and tail are as `split_arguments` gives them.
        """
        if head[-1] in "[{" or tail.startswith(","):
            self.items(head, arguments, tail)
            return
        if self._fits(head, arguments, tail, note):
            return
        noted = f"{head}  # {note}" if note else head
        if len(noted) > self.room and note:
            self.line(f"# {note}")
            noted = head
        if len(head) > self.room and re.match(r"\w+(, \w+)+ = ", head):
            self._unpack(head, arguments, tail)
            return
        self.line(noted)
        with self.indented():
            inside = ", ".join(arguments)
            if len(inside) <= self.room:
                self.line(inside)
            else:
                self._each(arguments, _comma(head, arguments))
        self.line(tail)

    def statement(self, text: str, note: str = "") -> None:
        """Add an expression or an assignment, broken if it is too long for a line."""
        noted = f"{text}  # {note}" if note else text
        if note and len(noted) > self.room:
            self.line(f"# {note}")
            noted = text
        if len(text) <= self.room:
            self.line(noted)
        elif text.endswith(")"):
            self.call(*split_arguments(text))
        else:  # nothing to break inside: a long operator or subscript
            head, value = _split_assignment(text)
            self.line(f"{head}(")
            with self.indented():
                self.line(value)
            self.line(")")

    def _unpack(self, head: str, arguments: Sequence[str], tail: str) -> None:
        """Add `a, b = f(x)` where not even `a, b = f(` fits."""
        targets, _, function = head.partition(" = ")
        value = function + ", ".join(arguments) + tail
        start = f"{targets} = ("
        if len(start) <= self.room and len(value) <= self.room - len(INDENT):
            self.line(start)
            with self.indented():
                self.line(value)
            self.line(")")
            return
        self.line("(")
        with self.indented():
            self._each(targets.split(", "))
        self.call(f") = {function}", arguments, tail)

    def items(self, head: str, items: Sequence[str], tail: str) -> None:
        """Add a tuple, list or dict: one line if it fits, else one line an item."""
        if not self._fits(head, items, tail):
            self._broken(head, items, tail)

    def _broken(self, head: str, items: Sequence[str], tail: str) -> None:
        self.line(head)
        with self.indented():
            self._each(items, "," if tail.startswith(",") else _comma(head, items))
        self.line(tail.removeprefix(","))

    def _fits(self, head: str, parts: Sequence[str], tail: str, note: str = "") -> bool:
        one = head + ", ".join(parts) + tail
        if len(one) > self.room and parts:
            return False
        noted = f"{one}  # {note}" if note else one
        if len(noted) <= self.room:
            self.line(noted)
        else:
            if note:
                self.line(f"# {note}")
            self.line(one)
        return True

    def _each(self, parts: Sequence[str], comma: str = ",") -> None:
        """Add one line for each part, and break what is too long for its line."""
        for part in parts:
            if len(part) < self.room or "\n" in part or part[-1] not in ")]}":
                self.lines(f"{part}{comma}")
                continue
            head, inside, tail = split_arguments(part)
            if CALLED.search(head):
                self.call(head, inside, f"{tail}{comma}")
            else:
                self.items(head, inside, f"{tail}{comma}")

    def text(self) -> str:
        """Return the file: no trailing blank lines, one newline at the end."""
        return "\n".join(self._lines).rstrip("\n") + "\n"


class Names:
    """Hands out unique, valid identifiers."""

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self._taken = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *reserved}

    def unique(self, wish: str) -> str:
        """Return `wish` as an identifier, numbered if it is taken; it is taken now."""
        base = re.sub(r"\W", "_", wish, flags=re.ASCII).strip("_") or "value"
        if base[0].isdigit():
            base = f"_{base}"
        name, count = base, 2
        while name in self._taken:
            name, count = f"{base}_{count}", count + 1
        self._taken.add(name)
        return name

    def release(self, name: str) -> None:
        """Let `name` be handed out again."""
        self._taken.discard(name)


def comment(text: str, room: int) -> str:
    """Return `# text`, cut to `room` columns, with nothing that could end the line."""
    line = "# " + "".join(c if c.isprintable() else " " for c in text)
    if columns(line) <= room:
        return line
    while columns(line) > room - len(" ..."):
        line = line[:-1]
    return f"{line.rstrip()} ..."


def in_docstring(text: str) -> str:
    """Return text that cannot end a docstring."""
    kept = "".join(c if c.isprintable() else " " for c in text)
    return kept.replace("\\", "/").replace('"""', "'''")


def columns(text: str) -> int:
    """Return how wide an editor shows the text; Chinese, say, takes two columns."""
    return len(text) + sum(unicodedata.east_asian_width(c) in "FW" for c in text)


def split_arguments(source: str) -> tuple[str, list[str], str]:
    """Split `x.f(a, (b, c), d=1)` into `x.f(`, its arguments and `)`.

    The call split is the last one, whose closing parenthesis ends the text. It may be a
    subscript, list, tuple or dict as well; a tuple of one item ends with `,)`.
    """
    code = _without_strings(source)
    start = len(code) - 1
    depth = 1
    while depth:
        start -= 1
        depth += (code[start] in ")]}") - (code[start] in "([{")
    start += 1
    arguments, last = [], start
    for index in range(start, len(code) - 1):
        depth += (code[index] in "([{") - (code[index] in ")]}")
        if code[index] == "," and depth == 0:
            arguments.append(source[last:index].strip())
            last = index + 1
    final = source[last:-1].strip()
    if final:
        arguments.append(final)
    head, tail = source[:start], source[-1]
    if not final and not _comma(head, arguments):
        tail = f",{tail}"
    return head, arguments, tail


def _split_assignment(text: str) -> tuple[str, str]:
    """Split `x = value` into `x = ` and the value; "" where nothing is assigned."""
    found = _without_strings(text).rpartition(" = ")
    end = len(text) - len(found[2])
    return text[:end], text[end:]


def _comma(head: str, parts: Sequence[str]) -> str:
    """Return a comma where one behind the last part changes nothing.

    A single one makes a tuple of what stands in parentheses, or in a subscript.
    """
    return "" if len(parts) == 1 and ALONE.search(head) else ","


def _without_strings(source: str) -> str:
    """Return the text with as many spaces in place of each string literal."""
    return re.sub(
        r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'""",
        lambda literal: " " * len(literal[0]),
        source,
    )
