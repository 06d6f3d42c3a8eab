"""Write all drawings: ``python -m drawings``, in ``docs``."""

from drawings import files

for path, svg in files().items():
    path.write_text(svg, encoding="utf-8")
