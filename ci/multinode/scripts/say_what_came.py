"""Write the working directory, arguments and variables of this process into its directory.

``python say_what_came.py NAMES [ARGUMENTS]...``, where NAMES is a file that lists variables as
JSON. All texts are bytes, written as if they were Latin-1.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def as_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


names = json.loads(Path(sys.argv[1]).read_text())
came = {
    "script": as_text(os.fsencode(sys.argv[0])),
    "folder": as_text(os.fsencode(os.getcwd())),
    "arguments": [as_text(os.fsencode(argument)) for argument in sys.argv[2:]],
    "variables": {name: as_text(os.environb.get(name.encode("latin-1"))) for name in names},
}
# Hosts may share the folder.
Path(f"{socket.gethostname()}.json").write_text(json.dumps(came))
