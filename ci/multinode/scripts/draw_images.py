"""Draw a few images for apps/imagenet: ``python draw_images.py FOLDER TRAIN VALIDATION``."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "apps/imagenet"))

importlib.import_module("generated").create(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
