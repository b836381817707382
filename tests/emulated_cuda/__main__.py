"""`python tests/emulated_cuda --devices 2 torchrun --nproc-per-node 2 train.py`: run it, and print what was seen."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Return 1 if the program failed, or if a fault was seen."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package, not what is in it
    from emulated_cuda.running import run

    parser = argparse.ArgumentParser(prog="python tests/emulated_cuda", description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--waits", action="store_true", help="print where the host waits for the device, too")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    done = run(arguments.command, devices=arguments.devices, waits=arguments.waits, capture=False)
    for text, count in done.waits.most_common(40):
        print(f"{count} × wait: {text}")
    print("\n".join(done.faults) or "no faults seen")
    return int(done.code != 0 or bool(done.faults))


if __name__ == "__main__":
    raise SystemExit(main())
