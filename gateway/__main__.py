"""`python -m gateway` is `polyhost`."""

import sys

from admin.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
