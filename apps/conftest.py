"""Draw few pictures: drawing them takes longer than all else that a short training does."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from matplotlib.figure import Figure

# By app and name. Files without a name of their own are chainermn's, which has one picture.
drawn: dict[tuple[Path, str], bytes] = {}


@pytest.fixture(scope="module", autouse=True)
def pictures_are_drawn_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw an app's first picture of each name; write the same again instead of later ones."""
    draw = Figure.savefig

    def draw_or_copy(
        figure: Figure, target: str | os.PathLike[str] | IO[bytes], **options: object
    ) -> None:
        is_file = hasattr(target, "write")
        key = request.path.parent, "" if is_file else Path(target).name
        if key not in drawn:
            draw(figure, picture := io.BytesIO(), **options)
            drawn[key] = picture.getvalue()
        if is_file:
            target.write(drawn[key])
        else:
            Path(target).write_bytes(drawn[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", draw_or_copy)
        yield
