"""Streaming of a growing text: complete words and characters, and all of it at the end."""

from __future__ import annotations

import pytest

from run.answers.chat_session import iter_completed_words

HALF = "\ufffd"


@pytest.mark.parametrize(
    ("grown", "expected"),
    [
        (["Who", "Whose", "Whose lamp", "Whose lamp?"], ["Whose", " lamp?"]),
        ([" Yes", " Yes.", " Yes. "], ["Yes.", ""]),
        (["caf" + HALF, "caf\u00e9", "caf\u00e9 is"], ["caf\u00e9", " is"]),
        (["\u706f", "\u706f" + HALF, "\u706f\u5728"], ["\u706f", "\u5728", ""]),
        (["one\ntwo", "one\ntwo\n\nthree"], ["one", "\ntwo", "\n\nthree"]),
        ([""], [""]),
        ([], [""]),
    ],
)
def test_pieces(grown: list[str], expected: list[str]) -> None:
    assert list(iter_completed_words(grown)) == expected


def test_all_of_it_is_printed_once_whatever_the_tokens() -> None:
    text = " A caf\u00e9, two \u706f\u5728 and \U0001f600 at the end \n"
    data = text.encode()
    grown = [data[:n].decode(errors="replace") for n in range(len(data) + 1)]
    printed = list(iter_completed_words(grown))
    assert "".join(printed) == text.strip()
    assert not any(HALF in piece for piece in printed)
