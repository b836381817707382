"""``python -m benchmarks.suites [library …]``: run their tests with every system, and write the page."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.suites import page
from benchmarks.suites.running import run
from benchmarks.suites.selection import SUITES
from benchmarks.suites.sources import fetched
from benchmarks.suites.systems import SYSTEMS


def main() -> None:
    """Run the suites that were named, or all of them."""
    given = _parsed()
    results: dict[str, Any] = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
    for suite in SUITES:
        if given.libraries and suite.library not in given.libraries:
            continue
        tests = fetched(suite, given.sources)
        by_system = results[suite.name] = {"versions": [version(suite.library), tests]}
        chosen = None
        for system in SYSTEMS[SYSTEMS.index(suite.base) :]:
            began = time.monotonic()
            by_system[system] = run(suite, system, given.sources, given.folder / f"{suite.name}-{system}", chosen)
            if chosen is None:
                chosen = [name for name, result in by_system[system].items() if result["outcome"] == "passed"]
            outcomes = Counter(result["outcome"] for result in by_system[system].values())
            print(f"{suite.name}, {system}: {dict(outcomes)}, {time.monotonic() - began:.0f} s", flush=True)
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if given.markdown is not None:
        given.markdown.write_text(page.page(results), encoding="utf-8")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description="Run other trainers' own tests.")
    known = list(dict.fromkeys(suite.library for suite in SUITES))
    parser.add_argument("libraries", nargs="*", metavar="library", help=f"of {', '.join(known)}; all when left out")
    parser.add_argument("--sources", type=Path, default=Path("build/peers-sources"), help="a folder of each library")
    parser.add_argument("--folder", type=Path, default=Path("build/peers-run"), help="where processes write")
    parser.add_argument("--json", type=Path, default=Path("build/peers.json"), help="results; those of others stay")
    parser.add_argument("--markdown", type=Path, help="write the page here")
    given = parser.parse_args()
    for library in given.libraries:
        if library not in known:
            parser.error(f"no suite is called {library!r}; use {', '.join(known)}")
    given.sources, given.folder = given.sources.resolve(), given.folder.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    return given


if __name__ == "__main__":
    main()
