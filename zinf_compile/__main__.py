"""`python -m zinf_compile` is the `zinf` command."""

import sys

from .cli import main

sys.exit(main())
