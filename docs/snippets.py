"""Copy code snippets in the documentation from files that tests run.

    python3 -m docs.snippets

A snippet stands in a document between `<!-- snippet: FILE NAME -->` and `<!-- end -->`. It is what
stands in FILE between the lines `# [NAME]` and `# [end]`; this writes it anew. A test fails where
one is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SNIPPET = re.compile(r"(<!-- snippet: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

DOCUMENTS = tuple(path for path in sorted((ROOT / "docs").glob("*.md"))
                  if _SNIPPET.search(path.read_text(encoding="utf-8")))  # fmt: skip


def rewrite_snippets(text: str) -> str:
    """Returns a Markdown document with its code snippets up to date."""
    return _SNIPPET.sub(
        lambda m: f"{m[1]}```python\n{_read_snippet(m[2], m[3])}\n```\n{m[4]}", text
    )


def _read_snippet(file: str, name: str) -> str:
    source = (ROOT / file).read_text(encoding="utf-8")
    match = re.search(rf"^# \[{re.escape(name)}\]\n(.*?)^# \[end\]$", source, re.DOTALL | re.M)
    if match is None:
        raise ValueError(f"{file} has no lines `# [{name}]` and `# [end]`")
    return match[1].strip("\n")


def main() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        document.write_text(rewrite_snippets(text), encoding="utf-8")


if __name__ == "__main__":
    main()
