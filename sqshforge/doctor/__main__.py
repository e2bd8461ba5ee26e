"""`python3 -m sqshforge.doctor`: `sqshforge doctor` before anything is installed."""

import sys

from sqshforge import doctor, project
from sqshforge.errors import SqshforgeError

try:
    sys.exit(doctor.main(project.find()))
except SqshforgeError as error:
    print("\n".join(error.lines()), file=sys.stderr)
    sys.exit(error.exit_code)
except OSError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
