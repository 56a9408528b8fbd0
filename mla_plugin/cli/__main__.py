"""``python -m mla_plugin.cli``: the command line from a checkout that is not installed."""

import sys

from mla_plugin.cli import main

sys.exit(main())
