"""Composer's launcher with warm processes, like itself: see tests.support.warm."""

import os
import sys

from composer.cli.launcher import main

sys.executable = os.environ["PYTHON_EXEC"]
sys.exit(main())
