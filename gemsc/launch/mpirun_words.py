"""What mpirun and MPI_Abort print about a rank that failed, in a line of our own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

Tell = Callable[[int | None, str], str]  # of a rank, or of all

# It stands between two lines of dashes, and Open MPI 5 has no --quiet. A rank that
# fails has said why; only what it could not say itself (a signal, an exit code) is
# worth a line.

_RULE = rb"^-{60,}\r?\n"
_WORDS = (
    rb"(?:MPI_ABORT was invoked"
    rb"|(?:prterun|mpirun|mpiexec)\S* (?:noticed|detected|has exited)"
    rb"|\S+ has lost communication with a remote daemon"
    rb"|Primary job +terminated normally)"
)
_PARAGRAPH = re.compile(_RULE + _WORDS + rb"[\s\S]*?" + _RULE, re.MULTILINE)
_BEGUN = re.compile(  # what may become one
    rb"^-+\r?\Z|" + _RULE + rb"(?:[^\n]*\Z|" + _WORDS + rb")", re.MULTILINE
)
_LOST = re.compile(rb"Remote daemon: +\[[^\]]*\] on node (\S+)")
_ENDS = (
    (
        rb"process rank (\d+) with PID \d+ on node \S+\s+"
        rb"exited\s+on\s+signal (\d+ \([^)]*\))",
        "was ended by signal {}",
    ),
    (rb"Process name: \[[^\]]*,(\d+)\]\s+Exit code: +(\d+)", "ended with exit code {}"),
    (
        rb"process rank (\d+) with PID \d+ on node \S+\s+exiting\s+improperly",
        "left before the others had ended",
    ),
)


def in_our_words(pieces: Iterable[bytes], tell: Tell) -> Iterator[bytes]:
    """Yield text as it comes, with a line of `tell` for a paragraph of mpirun's.

    `tell` adds to what has become of a rank what is known of it. Held back is only what
    may be the beginning of such a paragraph.
    """

    def summary(paragraph: re.Match[bytes]) -> bytes:
        if lost := _LOST.search(paragraph[0]):
            return f"{tell(None, f'host {lost[1].decode()} was lost')}\n".encode()
        for pattern, how in _ENDS:
            if found := re.search(pattern, paragraph[0]):
                rank, *rest = (group.decode() for group in found.groups())
                told = tell(int(rank), how.format(*rest))
                return f"{told}\n".encode() if told else b""
        return b""

    held = b""
    for piece in pieces:
        held = _PARAGRAPH.sub(summary, held + piece.replace(b"\0", b""))
        begun = _BEGUN.search(held)
        end = begun.start() if begun else len(held)
        yield held[:end]
        held = held[end:]
    yield held
