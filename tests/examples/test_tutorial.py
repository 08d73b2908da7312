"""Documents show the programs that are tested here."""

from __future__ import annotations

import pytest

from docs.snippets import DOCUMENTS, rewrite_snippets


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_snippets_are_those_of_the_programs(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert rewrite_snippets(text) == text, "run: python3 -m docs.snippets"


def test_a_snippet_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"mnist.py has no lines `# \[nothing\]`"):
        rewrite_snippets("<!-- snippet: examples/mnist.py nothing -->\n<!-- end -->")
