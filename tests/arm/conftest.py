"""Where these tests find those whose functions they run on other machines."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "kernels")]
