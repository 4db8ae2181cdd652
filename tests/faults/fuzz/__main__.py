"""`python -m tests.faults.fuzz [--requests N] [--archives N] [--seed S] [--minutes M]`"""

from __future__ import annotations

import argparse
import math
import sys
import time

from tests.faults.fuzz.archives import fuzz_archives
from tests.faults.fuzz.sending import fuzz_requests


def main() -> int:
    """Print what came of it; 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description="Damaged requests and archives.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--archives", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of requests, at most")
    given = parser.parse_args()
    began = time.monotonic()
    wrong = fuzz_archives(given.archives, given.seed)
    print(f"{given.archives} archives in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    outcome = fuzz_requests(given.requests, given.seed, given.minutes * 60)
    wrong += outcome.wrong
    print(f"{outcome.ways.total()} requests in {time.monotonic() - began:.0f} s")
    print({way.name: count for way, count in outcome.ways.items()})
    print(dict(sorted(outcome.statuses.items())))
    print("MB at rest, after each tenth and at the end:", *outcome.memory)
    print(len(wrong), "rules broken", *wrong[:20], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
