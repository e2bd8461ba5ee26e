"""AWS's private image registry: an image's account and region, the login, what refusals mean.

A login is valid for one host, which stands for one account in one region: it must be the image's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError, RequestError, SqshforgeError, WorkError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs, Result

# What docs/images/iam/ecr-pull.json allows: the first for the login, the rest for the pull.
ACTIONS = (
    "ecr:GetAuthorizationToken",
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:GetDownloadUrlForLayer",
)
TIMEOUT = 120.0  # seconds; by itself, aws retries for minutes if the network is silent
HOST = re.compile(
    r"(?P<account>[^./]*)\.dkr\.ecr(-fips)?\.(?P<region>[a-z][a-z0-9-]+)\.amazonaws\.com(\.cn)?"
)
DENIED = r"not authorized to perform:? (?P<action>[\w:-]+)"


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository of a private registry, such as 1234.dkr.ecr.us-west-2.amazonaws.com/NAME."""

    account: str
    region: str
    host: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """An explanation of a message of aws, an engine or the registry, and its fix.

    `words` is a regular expression; `what` and `fix` are formats of its groups and of the
    repository's fields.
    """

    words: str
    what: str
    fix: str
    error: type[SqshforgeError] = WorkError

    def of(self, repository: Repository, said: str) -> SqshforgeError | None:
        found = re.search(self.words, said, re.IGNORECASE)
        if found is None:
            return None
        facts = {**vars(repository), **found.groupdict()}
        where = said[said.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
        return self.error(self.what.format(**facts), where=where, fix=self.fix.format(**facts))


LOGIN = (
    "aws ecr get-login-password --region {region}"
    " | docker login --username AWS --password-stdin {host} (or buildah, or skopeo)"
)
# In each tuple the first match wins: a refusal often contains the words of later entries too.
BOTH = (
    Meaning(
        words=DENIED
        + ".*(explicit deny|no permissions boundary|(control|session|endpoint) policy)",
        what="a policy above this AWS role forbids {action} on {host}",
        fix="ask the account's administrator: no policy that is attached to the role lifts it",
    ),
    Meaning(
        words=DENIED + ".*no resource-based policy",
        what="{host} does not open {name} to this AWS role: {action} is missing there",
        fix="check account, region and name of the image: its owner decides, not the role",
    ),
    Meaning(
        words=rf"not authorized to perform:? (?P<action>{'|'.join(ACTIONS)})\b",
        what="the AWS role lacks the permission {action} for {host}/{name}",
        fix="attach docs/images/iam/ecr-pull.json to the role (docs/images/ecr.md says how)",
    ),
    Meaning(
        words=DENIED,
        what="the AWS role lacks the permission {action}",
        fix="allow it in the role's policy (docs/images/ecr.md)",
    ),
    Meaning(
        words="Could not connect to the endpoint|timeout on endpoint|no answer within"
        "|dial tcp|i/o timeout|Client\\.Timeout",
        what="the registry in {region} cannot be reached",
        fix="is {region} a region? Else see to the network and HTTPS_PROXY (docs/images/ecr.md)",
    ),
)
ASKING = (  # while asking aws for the password
    Meaning(
        words="ExpiredToken|RequestExpired|(token|session)\\b.* expired",
        what="the token of the AWS credentials has expired",
        fix="aws sso login, or a new session of the role; if it is new: is the clock right?",
    ),
    Meaning(
        words="UnrecognizedClient|InvalidClientTokenId|IncompleteSignature"
        "|InvalidSignature|SignatureDoesNotMatch",
        what="AWS does not accept the credentials in the region {region}",
        fix="see with aws sts get-caller-identity whose they are; is the clock right?",
    ),
    Meaning(
        words="Unable to locate credentials|Partial credentials|config profile .*not be found"
        "|Error loading SSO Token",
        error=MissingError,
        what="there are no AWS credentials to log in at {host} with",
        fix="aws configure, aws sso login, AWS_PROFILE, or an instance role (docs/images/ecr.md)",
    ),
)
PULLING = (
    Meaning(
        words="authorization token has expired",
        what="the login at {host} has expired: it lasts 12 hours",
        fix=LOGIN,
    ),
    Meaning(
        words="manifest unknown|name unknown|(Repository|Image)NotFoundException|: not found",
        error=RequestError,
        what="{host} has no such image of {name}: its tag moved, or it is not in {region}",
        fix="choose another tag or region: --set tag=TAG, --set region=REGION (docs/images/ecr.md)",
    ),
    Meaning(
        words="no basic auth credentials|unauthorized|authentication required",
        error=MissingError,
        what="the engine has no login at {host}: it must be for this very account and region",
        fix=LOGIN,
    ),
)


def parse(reference: str) -> Repository | None:
    """Return the private repository of an image's name; None if it is not in AWS's registry.

    Raises `RequestError` for a host that looks like AWS's but does not begin with an account id.
    """
    host, _, rest = reference.partition("/")
    found = HOST.fullmatch(host)
    name = re.split("[:@]", rest, maxsplit=1)[0]
    if found is None or not name:
        return None
    if not re.fullmatch("[0-9]{12}", found["account"]):
        raise RequestError(
            f"{found['account']!r} is not an AWS account: one has 12 digits",
            where=reference,
            fix="correct the image's name, or parameters.account in the recipe",
        )
    return Repository(account=found["account"], region=found["region"], host=host, name=name)


def login(repository: Repository, program: Path | str, programs: Programs) -> None:
    """Log an engine (docker, buildah or skopeo) in at the repository's own host.

    The password goes from aws to the engine's standard input and is never shown.
    Raises `MissingError` without aws or without credentials, `WorkError` if AWS or the engine
    refuses.
    """
    aws = programs.which("aws")
    if aws is None:
        raise MissingError(
            f"the program aws is not installed (it gives the password for {repository.host})",
            fix=f"{suggest.install(programs.which, 'aws')}, or pip install awscli",
        )
    argv: list[str | Path] = [aws, "ecr", "get-login-password", "--region", repository.region]
    asked = programs.attempt(argv, timeout=TIMEOUT)
    password = asked.out.strip()
    if asked.code != 0 or not password:
        raise _refused(repository, asked, asked.err, (*BOTH, *ASKING))
    argv = [program, "login", "--username", "AWS", "--password-stdin", repository.host]
    done = programs.attempt(argv, stdin=password.encode(), timeout=TIMEOUT)
    if done.code != 0:
        said = (done.err or done.out).replace(password, "[password]")
        raise _refused(repository, done, said, BOTH)


def explain(repository: Repository, said: str) -> SqshforgeError | None:
    """Explain the output of a failed pull; None if the message is unknown."""
    return _first((*BOTH, *PULLING), repository, said)


def _first(meanings: Sequence[Meaning], repository: Repository, said: str) -> SqshforgeError | None:
    errors = (meaning.of(repository, said) for meaning in meanings)
    return next((error for error in errors if error is not None), None)


def _refused(
    repository: Repository, result: Result, said: str, meanings: Sequence[Meaning]
) -> SqshforgeError:
    """Return the error for a failed login, with the last line of an unknown message."""
    name = Path(result.argv[0]).name
    last = said.strip().rpartition("\n")[2] or f"exit code {result.code}, without a word"
    return _first(meanings, repository, said) or WorkError(
        f"{name} cannot log in at {repository.host}", where=last, fix="docs/images/ecr.md"
    )
