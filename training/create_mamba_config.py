"""Write config.yaml for training.mamba_composer: `python -m training.create_mamba_config --...`.

The file has every key, with the value of its flag if given, else the system's default. Data is
given as comma-separated files or patterns, each weighted by its share of all tokens. A flag is
named after its key; if two sections have a key of that name, it is SECTION.KEY.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.config import setting
from training.config.flags import Flag, parse
from training.config.setting import settings
from training.entrypoint import exit_code
from training.errors import RequestError
from training.systems.composer import yaml
from training.systems.composer.config import ComposerConfig, HeldOut, Part

_DATA = ("text_paths", "code_paths", "eval_paths")
_COUNTED = "n_total_tokens"


def _flags() -> dict[str, tuple[str, Flag]]:
    """Return, for each flag's name, the section of its key, and the flag."""
    sections = {name: list(settings(kind)) for name, kind in yaml.SECTIONS.items()}
    times = Counter(one.name for those in sections.values() for one in those)
    found = {}
    for section, those in sections.items():
        for one in those:
            if one.name == _COUNTED:
                continue
            flag = Flag.of(one, section, () if times[one.name] > 1 else (f"{section}.{one.name}",))
            name = f"{section}.{one.name}" if times[one.name] > 1 else one.name
            found[name] = section, replace(flag, name=name)
    return found


def _paths(text: str) -> str:
    """Read comma-separated paths."""
    return ",".join(setting.path(one) for one in text.split(","))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Raises RequestError and TrainingError."""
    flags = _flags()
    own = [
        Flag("output", setting.path, "config.yaml", "file to write"),
        Flag("text_paths", _paths, "", "packed files of text"),
        Flag("code_paths", _paths, "", "packed files of code"),
        Flag("eval_paths", _paths, "", "packed files to evaluate on, held out from training"),
    ]
    given = parse(
        [*own, *(flag for _, flag in flags.values())],
        arguments,
        program="python -m training.create_mamba_config",
        about=str(__doc__),
    )
    output = Path(given["output"])
    if output.exists():
        raise RequestError(
            f"--output: {output} already exists; fix: remove it, or give another name"
        )
    sections: dict[str, dict[str, Any]] = {name: {} for name in yaml.SECTIONS}
    for name, (section, _) in flags.items():
        sections[section][name.rpartition(".")[2]] = given[name]
    sections["data"] |= _data({name: given[name] for name in _DATA})
    config = ComposerConfig(**{n: yaml.SECTIONS[n](**values) for n, values in sections.items()})
    yaml.write(config, output)
    print(
        f"wrote {output}: {config.data.n_total_tokens:,} tokens, {config.num_steps:,} steps\n"
        f"train it: composer -n 8 -m training.mamba_composer {shlex.quote(str(output))}"
    )
    return 0


def _data(given: dict[str, str]) -> dict[str, Any]:
    """Count the tokens of the training data, and weight it. Raises RequestError listing faults."""
    from training.data.packed import count_tokens, find_packed, require_held_out

    paths = {name: [one for one in text.split(",") if one] for name, text in given.items()}
    faults: list[str] = []
    tokens: dict[str, int] = {}
    named: dict[Path, str] = {}  # each file, by the path that gave it
    for name in ("text_paths", "code_paths"):
        for path in paths[name]:
            try:
                tokens[path] = count_tokens(path)
                files = [Path(one).resolve() for one in find_packed([path])]
            except RequestError as error:
                faults.append(f"--{name}: {error}")
                continue
            again = next((one for one in files if one in named), None)
            if again:
                what = f"{path} has {again}, which {named[again]} has too"
                faults.append(f"--{name}: {what}; fix: give each file once")
            named |= dict.fromkeys(files, path)
    for path in paths["eval_paths"]:
        try:
            count_tokens(path)
            require_held_out(find_packed([path]), find_packed(list(tokens)) if tokens else [])
        except RequestError as error:
            faults.append(f"--eval_paths: {error}")
    if not tokens and not faults:
        faults.append("--text_paths: no data is given, here or by --code_paths")
    if faults:
        raise RequestError.of(faults)
    total = sum(tokens.values())
    parts = {
        name: tuple(Part(path=one, weight=tokens[one] / total) for one in paths[name])
        for name in ("text_paths", "code_paths")
    }
    held = tuple(HeldOut(path=one, label=yaml.label_of(one)) for one in paths["eval_paths"])
    shares = {
        f"{name}_percentage": sum(part.weight for part in parts[f"{name}_paths"])
        for name in ("text", "code")
    }
    return {**parts, **shares, "eval_paths": held, _COUNTED: total}


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
