"""docs/reference/exit-codes.md: the exit codes of the programs."""

from __future__ import annotations

import signal

from reference.markdown import code, first_sentence, page, prose, table
from sqshforge import errors as tool
from training import errors as run
from training.job.job_log import MEANING

INTERRUPTED = str(128 + signal.SIGINT)
TOOL = (tool.WorkError, tool.RequestError, tool.MissingError)
RUN = (run.TrainingError, run.RequestError)
NAMED = {run.SAVED: "SAVED", run.HUNG: "HUNG", run.BAD_NODE: "BAD_NODE"}


def text() -> str:
    own = [[str(one.exit_code), _summary(one)] for one in TOOL]
    classes = [[str(one.exit_code), _summary(one)] for one in RUN]
    jobs = [
        [str(number), prose(words), code(NAMED.get(number, ""))]
        for number, words in MEANING.items()
    ]
    return page(
        "Exit codes",
        "sqshforge/errors.py, training/errors.py, training/job/job_log.py",
        "## sqshforge",
        table(["code", "meaning"], [["0", "done"], *own, [INTERRUPTED, "interrupted"]]),
        "1 is also what `diff --exit-code`, `lock --check` and `trace --check` end with where "
        "there is a difference, and `doctor --cluster` where a node does not answer. `sqshforge "
        "run` ends as its command does.",
        "## training",
        "An entry point, as `python -m training`:",
        table(
            ["code", "meaning"],
            [
                ["0", "done"],
                *classes,
                [str(run.SAVED), "stopped by SIGTERM after a checkpoint: start it again to go on"],
                [str(run.HUNG), "no progress, ended by its watch"],
                [str(run.INTERRUPTED), "interrupted, by a second Ctrl-C or before it trained"],
            ],
        ),
        "## A job",
        "`python -m training.launch`, and so a launcher; they are in `jobs/` of the run's folder, "
        "and `sqshforge status` shows them. What a launcher does after each is in "
        "[launch/README.md](../../launch/README.md#how-a-job-ends).",
        table(
            ["code", "meaning", "name in training/errors.py"],
            [*jobs, ["128 + n", "killed by signal n", ""]],
        ),
    )


def _summary(error: type[Exception]) -> str:
    return prose(first_sentence(error.__doc__ or ""))
