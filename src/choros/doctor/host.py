"""What runs on another host, in a login of the doctor's: it says the facts of the host, and whom it reaches.

::

    doctor                                     host
      ◄────────────────────────────── clock ────┤
      ◄──────────── facts, port, secret ────────┤  ⎫
      ├── the other hosts' ports and secrets ──►   ⎬ it listens
      ◄──────────── hosts that it misses ───────┤  ⎪
      ├── end of its input ────────────────────►   ⎭
"""

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from choros.doctor.gather import gather
from choros.doctor.reach import Target, listening, unreached

#: Begins each line for the doctor: a login shell may print others.
MARK = "choros doctor: "


def main() -> None:
    """Answers the doctor; its arguments: the job's directory, and the path of its mpirun, empty for the default."""
    _say(time.time())
    directory, mpirun = sys.argv[1:]
    with listening() as (port, secret):
        _say({"facts": asdict(gather(directory, mpirun or None)), "port": port, "secret": secret})
        targets = json.loads(sys.stdin.readline() or "[]")
        _say(unreached([Target(*each) for each in targets]))
        sys.stdin.read()


def _say(answer: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
