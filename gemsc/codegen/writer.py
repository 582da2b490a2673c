"""Write Python text that a formatter would leave alone; knows nothing of gemsc."""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gemsc.codegen.python_text import formatted

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

    def statement(self, text: str, note: str = "") -> None:
        """Add an expression or an assignment, broken if it is too long for a line.

        Its spaces, quotes and parentheses may be any. `note` is a comment, behind it or
        above.
        """
        text = formatted(text)
        if note and len(f"{text}  # {note}") > self.room:
            self.line(f"# {note}")
            note = ""
        if len(text) <= self.room:
            self.line(f"{text}  # {note}" if note else text)
        elif text[-1] in ")}":
            self.bracketed(*split_arguments(text))
        else:  # nothing to break inside: a long operator or subscript
            head, value = _split_assignment(text)
            self.bracketed(f"{head}(", [value], ")")

    def argument(self, text: str) -> None:
        """Add an argument of a call in a line of its own, broken as a statement is."""
        self._part(formatted(f"f({text})")[2:-1], ",")

    def bracketed(self, head: str, parts: Sequence[str], tail: str) -> None:
        """Add `head` + parts + `tail`, broken as a formatter breaks brackets.

        One line if it fits; else the arguments of a call on one line of their own; else
        one line a part with a trailing comma, if that means the same. The three are as
        `split_arguments` gives them.
        """
        inside = ", ".join(parts)
        if len(head + inside + tail) <= self.room or not parts:
            self.line(head + inside + tail)
            return
        if len(head) > self.room and re.match(r"\w+(, \w+)+ = ", head):
            self._unpack(head, parts, tail)
            return
        self.line(head)
        with self.indented():
            if CALLED.search(head) and len(inside) <= self.room:
                self.line(inside)
            else:
                comma = "," if tail.startswith(",") else _comma(head, parts)
                for part in parts:
                    self._part(part, comma)
        self.line(tail.removeprefix(","))

    def _part(self, part: str, comma: str) -> None:
        """Add what stands between commas, and break what is too long for its line."""
        if len(part + comma) <= self.room or part[-1] not in ")]}":
            self.line(f"{part}{comma}")
        else:
            head, inside, tail = split_arguments(part)
            self.bracketed(head, inside, f"{tail}{comma}")

    def _unpack(self, head: str, arguments: Sequence[str], tail: str) -> None:
        """Add `a, b = f(x)` where not even `a, b = f(` fits."""
        targets, _, function = head.partition(" = ")
        value = function + ", ".join(arguments) + tail
        start = f"{targets} = ("
        if len(start) <= self.room and len(value) <= self.room - len(INDENT):
            self.bracketed(start, [value], ")")
            return
        self.line("(")
        with self.indented():
            for target in targets.split(", "):
                self.line(f"{target},")
        self.bracketed(f") = {function}", arguments, tail)

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
    parts = _without_strings(text).rpartition(" = ")
    end = len(text) - len(parts[2])
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
