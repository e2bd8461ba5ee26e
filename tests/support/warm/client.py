"""Stand for a process that the server forks: pass on its files and signals, and end as it does.

Does not use pathlib, which takes longer to load than everything that is done here.
"""

import json
import os
import signal
import socket
import sys

connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["WARM_PYTHON"])
folder = os.getcwd()  # noqa: PTH109
request = {"words": sys.argv[1:], "environment": dict(os.environ), "folder": folder}
text = json.dumps(request).encode()
socket.send_fds(connection, [len(text).to_bytes(8, "little")], [0, 1, 2])
connection.sendall(text)
answers = connection.makefile()
child = int(answers.readline())
with open("/proc/self/comm", "w") as name:  # noqa: PTH123 - see tests.support.processes
    name.write(f"warm {child}")
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(child, number))
code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
