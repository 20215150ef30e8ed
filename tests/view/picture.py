"""The picture of docs/view.md: the view of a recorded job. Run as a script (``python -m view.picture``), it draws it.

``python -m view.picture FILE.json`` takes the record of another job: what ``choros top --json`` has printed.
"""

import asyncio
import json
import re
import sys
from pathlib import Path

from choros.view.app import TopApp

RECORD = Path(__file__).with_name("record.json")
PICTURE = Path(__file__).parents[2] / "docs" / "view.svg"


async def picture(record, size):
    """The view of ``record`` as SVG, in a window of ``size``."""
    app = TopApp(lambda: record)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        drawn = app.export_screenshot(title="chorosrun --view", simplify=True)
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # they are on another server


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1] if sys.argv[1:] else RECORD).read_text())
    PICTURE.write_text(asyncio.run(picture(found, (100, 26))) + "\n")
