"""`python -m gateway` is `polyhost`."""

import sys

from gateway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
