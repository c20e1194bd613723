"""The time to open a store with a log of some size; for `benchmarks/run`.

    python benchmarks/recover.py --state crash [--mib 256] [--size 128]

Prints one line of JSON. The states are a clean stop, a crash, and a crash that lost queues and
index, which are rebuilt from the log.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from store import fill, record
from turbopump.bench.sample import Stopwatch, summary
from turbopump.store import Store

STATES = ("clean stop", "crash", "queues lost")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", choices=STATES, required=True)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--size", type=int, default=128)
    options = parser.parse_args()
    count = options.mib * 2**20 // record(b"x" * options.size, 0).size
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "store"
        with Store.open(root) as made:
            fill(made, count, options.size)
        if options.state != "clean stop":
            (root / "abort").touch()
        if options.state == "queues lost":
            shutil.rmtree(root / "consumequeue")
            shutil.rmtree(root / "index")
        watch = Stopwatch()
        with Store.open(root) as opened:
            sample = watch.sample(count)
            assert opened.recovered.crashed == (options.state != "clean stop")
    print(json.dumps(summary([sample], options.size, None)))


if __name__ == "__main__":
    main()
