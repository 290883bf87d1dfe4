"""`python -m dilated_attention`: the same as the command `dilated-attention`."""

import sys

from dilated_attention.cli import main

if __name__ == "__main__":
    sys.exit(main())
