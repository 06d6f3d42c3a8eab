"""Whether every public name of chainermn can be imported."""

from __future__ import annotations


def examine() -> int:
    """Return the number of public names."""
    import chainermn

    for name in chainermn.__all__:
        getattr(chainermn, name)
    return len(chainermn.__all__)
