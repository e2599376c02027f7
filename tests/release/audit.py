"""``python -m tests.release.audit LOCK ...``: known vulnerabilities of locked packages.

pip-audit asks PyPI's database. Where it cannot be reached, nothing is known, which is
said in words, and is no failure.
"""

import json
import subprocess
import sys
from typing import Any


def main() -> int:
    """Audits each lock; returns 1 if a vulnerability is known."""
    known = 0
    for lock in sys.argv[1:]:
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "--require-hashes",
            "--disable-pip",
        ]
        done = subprocess.run(
            [*command, "--format", "json", "-r", lock],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.stdout:
            print(f"{lock}: not audited: {done.stderr.strip().splitlines()[-1]}")
            continue
        lines, count = report(json.loads(done.stdout)["dependencies"])
        known += count
        print(*(f"{lock}: {line}" for line in lines), sep="\n")
    return 1 if known else 0


def report(dependencies: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Returns lines about an audit, and the number of vulnerabilities."""
    audited = [one for one in dependencies if "skip_reason" not in one]
    if not audited:
        return (
            ["not audited: the database of vulnerabilities cannot be reached"],
            0,
        )
    found = [
        f"{one['name']} {one['version']}: {each['id']}, fixed in "
        f"{', '.join(each['fix_versions']) or 'no release'}"
        for one in audited
        for each in one["vulns"]
    ]
    skipped = len(dependencies) - len(audited)
    shown = f"{len(audited)} packages audited, {len(found)} vulnerabilities"
    return [*found, shown + (f", {skipped} not known there" if skipped else "")], len(
        found
    )


if __name__ == "__main__":
    sys.exit(main())
