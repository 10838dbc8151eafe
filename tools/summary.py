"""Adds up JUnit files and prints the last line of ./dev test: `N passed, N failed, N skipped`."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main(paths: list[str]) -> int:
    passed = failed = skipped = 0
    for path in paths:
        if not Path(path).exists():
            print(f"{path} was not written: its runner did not finish")
            failed += 1
            continue
        for case in ET.parse(path).getroot().iter("testcase"):
            outcome = {child.tag for child in case}
            if outcome & {"failure", "error"}:
                failed += 1
            elif "skipped" in outcome:
                skipped += 1
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
