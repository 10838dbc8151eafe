"""Programs in the documentation print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = (
    "README.md",
    "docs/design.md",
    "docs/geometry.md",
    "docs/layerwise.md",
    "docs/lifecycle.md",
    "docs/plan_files.md",
)

# A program and, as the next thing after it, its output.
PROGRAM = re.compile(r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs() -> list[tuple[str, str, str]]:
    found = []
    for document in DOCUMENTS:
        for match in PROGRAM.finditer((ROOT / document).read_text()):
            found.append((document, match[1], match[2]))
    return found


def without_times(output: str) -> str:
    """Seconds differ from run to run; everything else has to be equal."""
    return re.sub(
        r"^seconds: .*$",
        lambda line: re.sub(r"[\d.]+", "#", line[0]),
        output.rstrip("\n"),
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize("document, program, output", programs(), ids=lambda v: v.split("\n")[0])
def test_a_program_prints_what_stands_below_it(document: str, program: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, document, "exec"), {"__name__": "__main__"})
    assert without_times(printed.getvalue()) == without_times(output)


def test_every_document_shows_a_program() -> None:
    assert {document for document, _, _ in programs()} == set(DOCUMENTS)


def test_the_readme_is_short() -> None:
    first = next(program for document, program, _ in programs() if document == "README.md")
    assert len([line for line in first.splitlines() if line]) <= 15
    assert len(README.splitlines()) <= 150


def test_the_readme_names_every_folder() -> None:
    codemap = README.partition("## Codemap")[2]
    folders = {path.parent.name for path in ROOT.glob("*/CMakeLists.txt")} - {"build", "python"}
    folders |= {"python/loadplan", "examples", "docs", "cmake", "tools"}
    missing = [folder for folder in sorted(folders) if f"`{folder}/`" not in codemap]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/performance.md"])
def test_commands_exist(document: str) -> None:
    commands = re.findall(r"\./dev ([a-z]+)", (ROOT / document).read_text())
    door = (ROOT / "dev").read_text()
    assert commands
    for command in sorted(set(commands)):
        assert re.search(rf"^# [a-z, ]*\b{command}\b.*:", door, re.MULTILINE), command


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/performance.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"
