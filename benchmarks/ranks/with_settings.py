"""Run an unchanged app with other settings: ``with_settings.py JSON train.py ARGUMENT...``."""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import chainermn


def main() -> None:
    """Run the app.

    JSON is an object with ``dtype``, the type of gradients between hosts, and arguments of
    `made_from`.
    """
    given, *sys.argv = sys.argv[1:]
    settings = json.loads(given)
    chainermn.create_communicator = functools.partial(
        chainermn.create_communicator, allreduce_grad_dtype=settings.pop("dtype", None)
    )
    chainermn.create_multi_node_optimizer = functools.partial(
        chainermn.create_multi_node_optimizer, **made_from(**settings)
    )
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    os.environ["MPLBACKEND"] = "Agg"
    runpy.run_path(sys.argv[0], run_name="__main__")


def made_from(
    compression: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return arguments of ``create_multi_node_optimizer``.

    Parameters
    ----------
    compression : dict, optional
        ``kind``, the name of its class, and the arguments of that class.
    local : dict, optional
        Arguments of `LocalSGD`.
    **settings
        Other arguments, which are returned unchanged.
    """
    # Imported only if needed, because the original has neither.
    if local is not None:
        settings["local"] = chainermn.optimizers.LocalSGD(**local)
    if compression is not None:
        arguments = dict(compression)
        kind = getattr(chainermn.compression, arguments.pop("kind"))
        settings["compression"] = kind(**arguments)
    return settings


if __name__ == "__main__":
    main()
