"""Seconds that each slow module of the suite takes, so that the longest begin first.

make test PYTEST_ADDOPTS=--junitxml=report.xml && python -m tests.support.measured report.xml
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
LEAST_S = 5


def measured_s() -> dict[str, int]:
    """Return the seconds of each module that takes some, by its path from the root."""
    return json.loads(FILE.read_text())


def main(report: str) -> None:
    """Write down what a report of pytest says."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ET.parse(report).iter("testcase"):
        seconds[case.attrib["classname"].replace(".", "/") + ".py"] += float(case.attrib["time"])
    slow = {
        path: round(taken)
        for path, taken in sorted(seconds.items(), key=lambda one: -one[1])
        if taken >= LEAST_S
    }
    FILE.write_text(json.dumps(slow, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
