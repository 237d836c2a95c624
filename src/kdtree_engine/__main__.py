"""`python -m kdtree_engine` is the command `kdtree-engine`."""

import sys

from kdtree_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
