"""Composer's launcher, whose processes are warm as it is: see tests.support.warm."""

import os
import sys

from composer.cli.launcher import main

sys.executable = os.environ["PYTHON_EXEC"]
sys.exit(main())
