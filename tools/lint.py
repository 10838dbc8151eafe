"""The rules of CONTRIBUTING.md that no formatter knows. Prints `file:line: what is wrong`."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("geometry", "plan", "backend", "lifecycle", "transfer", "ops")
CPP = (".h", ".cc")

# (which files, what must not be on a line, why). The first match of a line counts.
RULES = [
    (
        r"^(geometry|plan)/",
        r'#include [<"](ATen|c10|torch|cuda|nccl)',
        "geometry and plan include no torch header",
    ),
    (
        r"^(?!backend/register\.cc$|ops/ops\.cc$).*\.(h|cc)$",
        r"\bTORCH_LIBRARY",
        "operators are registered in backend/register.cc and ops/ops.cc only",
    ),
    (
        r"^(?!tests/|bench/).*\.(h|cc)$",
        r"#include <(torch/(torch|extension)|ATen/ATen)\.h>",
        "this header costs seconds a file; include the narrow one",
    ),
    (
        r"\.(h|cc)$",
        r"absl::(optional|string_view|variant|any|Span)\b|absl/log",
        "use std:: instead; Debian's Abseil has types of its own for these",
    ),
    (r"\.(h|cc)$", r"^\s*#\s*if 0\b", "no code that is switched off"),
    (r"\.(h|cc|py)$", r"\b(TODO|FIXME|XXX)\b", "do it, or say in the docs that it is missing"),
    (
        r"^(geometry|plan|backend|lifecycle|transfer)/.*\.(h|cc)$",
        r"^[^/\"]*\b(throw\b(?!;)|(std::)?(abort|exit)\()",
        "failures are absl::Status, in kernels TORCH_CHECK",
    ),
    (
        r"",
        r"/(home|root|Users)/\w|/work/(main|shared)\b",
        "a path of one machine",
    ),
]
LIMITS = {".h": 250, ".cc": 500}
NOTE = re.compile(r"Note \[([^\]]+)\]")


def tracked_files() -> list[str]:
    """Files that git knows or would add, without this one, which spells what it forbids."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = sorted(set(listed.stdout.splitlines()) - {"tools/lint.py"})
    return [name for name in names if (ROOT / name).is_file()]


def check_lines(name: str, lines: list[str]) -> list[str]:
    rules = [(re.compile(bad), why) for where, bad, why in RULES if re.search(where, name)]
    return [
        f"{name}:{number}: {why}"
        for number, line in enumerate(lines, 1)
        for bad, why in rules
        if bad.search(line)
    ]


def check_shape(name: str, lines: list[str]) -> list[str]:
    """Length, and that a source includes its own header first: so each header compiles alone."""
    found = []
    path = Path(name)
    limit = LIMITS.get(path.suffix)
    if limit and len(lines) > limit:
        found.append(f"{name}:{limit}: {len(lines)} lines, the limit is {limit}; split it")
    header = path.with_suffix(".h")
    if path.suffix == ".cc" and (ROOT / header).exists():
        first = next((line for line in lines if line.startswith("#include")), "")
        # A host has its own root.
        own = header.name if name.startswith("examples/") else header
        if first.strip() != f'#include "{own}"':
            found.append(f'{name}:1: the first include must be "{own}"')
    return found


def check_notes(texts: dict[str, str]) -> list[str]:
    """`see Note [X]` cites a note; any other mention is the note itself, of which there is one."""
    defined: Counter[str] = Counter()
    cited: dict[str, str] = {}
    for name, text in texts.items():
        if not name.endswith((*CPP, ".cu", ".cmake")):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for match in NOTE.finditer(line):
                if re.search(r"\bsee\b", line[: match.start()], re.IGNORECASE):
                    cited.setdefault(match[1], f"{name}:{number}")
                else:
                    defined[match[1]] += 1
    found = [
        f"Note [{t}] is written {n} times; cite it as `see Note [{t}]`"
        for t, n in defined.items()
        if n > 1
    ]
    found += [f"{at}: Note [{t}] is nowhere" for t, at in cited.items() if t not in defined]
    return found


def check_tests(texts: dict[str, str]) -> list[str]:
    """Each unit of the torch-free layers is tested: under its name, or where its header is used.

    A source without a header of its own is a part of another unit, and tested with that.
    """
    tests = {name: text for name, text in texts.items() if name.startswith("tests/")}
    found = []
    for name in texts:
        header = name[:-3] + ".h"
        if not re.match(r"(geometry|plan)/[^/]+\.cc$", name) or header not in texts:
            continue
        test = f"tests/{name[:-3]}_test.cc"
        if test not in tests and not any(f'"{header}"' in text for text in tests.values()):
            found.append(f"{name}:1: {test} is missing, and no other test includes {header}")
    return found


def check_lists(texts: dict[str, str]) -> list[str]:
    """CMake's lists are explicit: they name every source and module, and nothing else."""
    found = []
    for name in texts:
        path = Path(name)
        built = path.suffix == ".cc" and path.parts[0] in (*LAYERS, "tests", "bench")
        folder = "python" if path.parts[0] == "python" else str(path.parent)
        packaged = path.suffix == ".py" and path.parts[0] == "python"
        entry = str(path.relative_to(folder)) if built or packaged else ""
        # A benchmark is listed without its suffix: its name is the target's.
        wanted = path.stem if path.parts[0] == "bench" else entry
        if entry and wanted not in texts.get(f"{folder}/CMakeLists.txt", ""):
            found.append(f"{name}:1: not in {folder}/CMakeLists.txt")
    for name, text in texts.items():
        if not name.endswith("/CMakeLists.txt"):
            continue
        for entry in re.findall(r"^\s+([\w/]+\.(?:cc|py))\)?$", text, re.MULTILINE):
            if not (ROOT / Path(name).parent / entry).exists():
                found.append(f"{name}:1: {entry} does not exist")
    return found


def main() -> int:
    texts = {}
    for name in tracked_files():
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a data file
            continue
    found = []
    for name, text in texts.items():
        lines = text.splitlines()
        found += check_lines(name, lines) + check_shape(name, lines)
    found += check_notes(texts)
    found += check_tests(texts)
    found += check_lists(texts)
    print("\n".join(found) if found else "lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
