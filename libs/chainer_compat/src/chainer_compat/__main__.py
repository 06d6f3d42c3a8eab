"""``python -m chainer_compat [--json]``: show versions, and which repairs are active and why."""

import argparse
import json

from chainer_compat import report


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m chainer_compat", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    collected = report.collect()
    print(json.dumps(collected, indent=2) if arguments.json else report.as_text(collected))


if __name__ == "__main__":
    main()
