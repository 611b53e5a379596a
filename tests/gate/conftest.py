"""Makes the example reports of the page's tests importable, also where only these tests run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "report"))
