"""Where things lie in the repository, for tests that read files or start programs."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
