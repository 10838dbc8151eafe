"""Adds up JUnit files and prints the last line of ./dev test: `N passed, N failed, N skipped`.

A test of ctest may be a whole GoogleTest program. Where the program wrote its own file into
`gtest/`, the tests in there count instead.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def outcome(case: ET.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    if "skipped" in tags or case.get("result") == "skipped":
        return "skipped"
    return "passed"


def count(path: Path, programs: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for case in ET.parse(path).getroot().iter("testcase"):
        inner = programs / f"{case.get('name')}.xml"
        parts = count(inner, programs) if inner.exists() else Counter()
        # A program that died between its tests has no failure in its file.
        if not parts["failed"] and (not parts or outcome(case) == "failed"):
            parts[outcome(case)] += 1
        found += parts
    return found


def main(paths: list[str]) -> int:
    programs, *files = map(Path, paths)
    total: Counter[str] = Counter()
    for path in files:
        if path.exists():
            total += count(path, programs)
        else:
            print(f"{path} was not written: its runner did not finish")
            total["failed"] += 1
    print(", ".join(f"{total[key]} {key}" for key in ("passed", "failed", "skipped")))
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
