"""`python -m zinf_compile` is the `zinf` command."""

import sys

from zinf_compile.cli.main import main

sys.exit(main())
