"""Run every check of `checks.py` on this machine's GPU and print a table: `python tests/gpu/selftest.py [WORD...]`.

With words, only checks whose names hold one of them. Exit 1 when one fails.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import checks
import kernels

from devplan.runtime.cuda import driver


def main(words: list[str]) -> int:
    ready, reason = driver.cuda_available()
    if not ready:
        print(reason)
        return 6
    checks.KERNELS.update(kernels.build_apart(driver.devices()[0].architecture))
    failed = []
    for check in checks.CHECKS:
        name = check.__name__.removeprefix("check_")
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        try:
            finding, mark = check(), "ok"
        except Exception as error:
            finding, mark = f"{type(error).__name__}: {error}", "FAILED"
            failed.append((name, traceback.format_exc()))
        print(f"{mark:6} {name:32} {time.perf_counter() - start:6.2f} s  {finding}", flush=True)
    for name, trace in failed:
        print(f"\n--- {name}\n{trace[-2500:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
