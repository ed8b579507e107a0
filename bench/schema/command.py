"""A command as what is trained: its placeholders, and the words that a case puts there.

``python train.py --batch-size {batch_size} --dtype {precision}`` has an axis of `bench.schema.case`
in each pair of braces, or a variable of the user's own. ``{precision:fp32=,bf16-amp=--amp}`` gives
the script's own words for its values. The command is started without a shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

from bench.base.errors import UsageError, nearest
from bench.base.inject.sitecustomize import TEXTS
from bench.schema.axis import PARTED, axis_flag, name_column, own_axis

_PLACE = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)(?::([^{}]*))?\}")
_PIECE = re.compile(r"\\([\\,])|.", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SUCH_AS = "--vary depth 12 24"
_SHELL = re.compile(r"(?:\||\|\||&&?|;|[0-9&]?>\S*|<|~/\S*|\$\{?[A-Za-z_]\S*)")
_BETWEEN = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\[^\n])|(?:\s|\\\n)+""", re.DOTALL)
_SCRIPT = re.compile(r"^[\w ./+-]+\.(?:py|sh)$|[\w./+-]+\.(?:py|sh)\b")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


ITEMS = 10_000
"""What the time of a command is of that tells of no epoch, or of epochs of other sizes than other
rows: as many items, whatever the batch size."""

OUT = "out"
"""The placeholder of a folder that each run of a case has for itself."""

BESIDE_COMMAND = (
    *("command", "vary", "device", "memory_limit", "power_limit", "steps", "items", "profile"),
    "seed",
)
"""The axes that a command has without a placeholder for them."""


OF_HARNESS = (
    *("fraction", "until", "evaluate", "checkpoint", "profile", "parallel", "power_limit"),
    *("workload", "command", "vary"),
)
"""The axes that the harness itself applies, and no word of a command: a row named by one would say
that it did."""

MEANT = (*OF_HARNESS, "memory_limit", "steps", "items")
"""The axes of which ``--vary NAME`` gives no value: what they say is of the measurement."""


def list_places(command: str) -> list[str]:
    """Return the names in the placeholders of a command, in order."""
    return [found[1] for found in _PLACE.finditer(command)]


def list_worded(command: str) -> dict[str, list[str]]:
    """Return the values for which the placeholders of a command give words of the script's own, by
    the names of these placeholders.

    >>> list_worded("t.py {precision:fp32=,bf16-amp=--amp} {lr}")
    {'precision': ['fp32', 'bf16-amp']}
    """
    found = [one for one in _PLACE.finditer(command) if one[2] is not None]
    return {one[1]: [*_read_words(one[2])] for one in found}


def _split(text: str) -> list[str]:
    r"""Split a text at its commas; ``\,`` is a comma that does not, and ``\\`` a backslash."""
    parts = [""]
    for found in _PIECE.finditer(text):
        parts[-1] += "" if found[0] == "," else found[1] or found[0]
        parts += [""] * (found[0] == ",")
    return parts


def _escape(text: str) -> str:
    return re.sub(r"[\\,]", r"\\\g<0>", text)


def quote_value(text: str) -> str:
    """Return the word of ``--vary`` that stands for a value, whatever is in it."""
    return _escape(text) if "," in text else text


def write_words(words: Mapping[str, str]) -> str:
    """Return some values with the script's own words for each, as ``--vary`` and placeholders take
    them.

    >>> print(write_words({"off": "", "on": "--layers 1,2"}))
    off=,on=--layers 1\\,2
    """
    return ",".join(f"{_escape(value)}={_escape(word)}" for value, word in words.items())


def _read_words(text: str) -> dict[str, str]:
    """Read what `write_words` writes. Raises ValueError: a value has no words, no name, or is
    given twice."""
    pairs = [part.partition("=") for part in _split(text)]
    words = {value.strip(): word for value, _, word in pairs}
    if "" in words or len(words) < len(pairs) or not all(sign for _, sign, _ in pairs):
        raise ValueError(
            r"give words for each value, and each once, as off=,on=--amp; "
            r"a comma of the words themselves is written \,"
        )
    return words


def parse_command(text: str) -> str:
    """Check a command, and return it with one space between its words, however it was laid out: a
    sweep tells commands apart by their text. Raises ValueError: it is empty, its quotes are not
    closed, or it is meant for a shell.

    >>> parse_command("python t.py  \\\\\\n  --note 'a  b'\\n")
    "python t.py --note 'a  b'"
    """

    def space(found: re.Match[str]) -> str:
        return found[1] or " " * (found[0] != "\\\n")  # which a shell leaves out

    text = _BETWEEN.sub(space, text).strip()
    if why := _refuse_words(text):
        raise ValueError(why)
    if not split_command(text)[1]:
        raise ValueError("give what starts your training, such as 'python train.py'")
    for found in _PLACE.finditer(text):
        try:
            _read_words(found[2] if found[2] is not None else "value=")
        except ValueError as error:
            raise ValueError(f"{{{found[1]}:…}}: {error}") from None
    return text


def _refuse_words(text: str) -> str:
    """Return why the words of a command are none without a shell; empty if they are."""
    try:
        operator = next(filter(_SHELL.fullmatch, shlex.split(text)), "")
    except ValueError as error:
        return f"its quotes do not match ({error})"
    no_shell = "is for a shell, and no shell runs the command; give sh -c '…', or a script"
    return operator and f"{operator} {no_shell}"


def parse_vary(text: str) -> str:
    """Check the values of one's own placeholders, ``depth=12 clip=4``, as a cell has them. Raises
    ValueError: they are not of that form."""
    for word in shlex.split(text):
        name, sign, _ = word.partition("=")
        if not sign or not _NAME.fullmatch(name):
            raise ValueError(f"a --vary is a name and its values, such as {_SUCH_AS}")
    return text


@cache
def read_vary(text: str | None) -> Mapping[str, str]:
    """Return the values of one's own placeholders, by the names of their axes.

    >>> read_vary("depth=12 note='a b'")
    {'{depth}': '12', '{note}': 'a b'}
    """
    pairs = (word.partition("=") for word in shlex.split(text or ""))
    return {own_axis(name): value for name, _, value in pairs}


def write_vary(values: Mapping[str, str | None]) -> str | None:
    """Return the text that `read_vary` reads; None without a value."""
    pairs = ((name_column(axis), value) for axis, value in values.items() if value is not None)
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in pairs) or None


def parse_varied(name: str, texts: Sequence[str]) -> dict[str, str | None]:
    r"""Read the words after ``--vary NAME``: values, each with the script's own words for it, None
    where it stands as it is. Raises UsageError: they are of another form.

    A word is a value as it stands. One with commas and a ``=`` is a list of values with words,
    VALUE=WORDS,VALUE=WORDS: the words are what follows the first ``=``, or nothing. A comma that
    divides nothing is written ``\,``, which it has to be in such a list, and where ``0.1,0.2`` may
    as well be meant as two values: alone, or beside words without commas.

    >>> parse_varied("amp", ["off=,on=--amp"]), parse_varied("sizes", [r"1\,2", r"a=1\,2"])
    ({'off': '', 'on': '--amp'}, {'1,2': None, 'a=1,2': None})
    """
    read = dict[str, str | None]()
    where = f"--vary {' '.join([name, *texts])}"[:200]
    parted = [bool(PARTED.fullmatch(text)) for text in texts]
    if any(parted) and (len(texts) == 1 or not all(parted)):
        words = (
            " ".join(filter(None, text.split(","))) if several else shlex.quote(text)
            for text, several in zip(texts, parted, strict=True)
        )
        right = " ".join([name, *words])
        raise UsageError(
            rf"{where}: give --vary {right}; a comma that is part of a value is written '\,'"
        )
    for text in texts:
        parts = _split(text) if "," in text and ("=" in text or r"\," in text) else [text]
        try:
            values: Mapping[str, str | None] = {parts[0]: None}
            values = _read_words(text) if len(parts) > 1 else values
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
        if any(read.get(value, word) != word for value, word in values.items()):
            raise UsageError(f"{where}: a value is given twice; leave out one")
        read |= values
    empty = [text.endswith("=") for text in texts]
    if any(empty) and not all(empty) and all("=" in text and "," not in text for text in texts):
        raise UsageError(f"{where}: write the values with their words as one, {','.join(texts)}")
    if any("{" in (word or "") or "}" in (word or "") for word in read.values()):
        raise UsageError(f"{where}: the words of a value can hold no braces")
    return read


def combine_vary(values: Mapping[str, Sequence[str]]) -> list[str | None]:
    """Return every combination of the values of one's own placeholders, as cells have them, the
    last varying fastest.

    >>> combine_vary({"amp": ["off", "on"], "depth": ["4"]})
    ['amp=off depth=4', 'amp=on depth=4']
    """
    rows = product(*values.values())
    return [write_vary(dict(zip(values, row, strict=True))) for row in rows]


def place_varied(
    given: Sequence[Sequence[str]], commands: Sequence[str | None]
) -> tuple[dict[str, list[str]], list[str | None]]:
    """Return the values of each ``--vary NAME VALUE …``, and the commands with the words of these
    values in their placeholders. Raises UsageError: one has no value, no name, or the name of
    another, or its words cannot be put there.

    >>> place_varied([["amp", "off=,on=-a"], ["depth", "4"]], ["t.py {amp} {depth}"])
    ({'amp': ['off', 'on'], 'depth': ['4']}, ['t.py {amp:off=,on=-a} {depth}'])
    """
    names = [name for name, *_ in given]
    for name, *values in given:
        if not (_NAME.fullmatch(name) and values and names.count(name) == 1):
            raise UsageError(
                f"--vary {name}: give a name once, and then its values, such as {_SUCH_AS}"
            )
    read = {name: parse_varied(name, values) for name, *values in given}
    words = {
        name: {value: shlex.quote(value) if word is None else word for value, word in own.items()}
        for name, own in read.items()
        if any(word is not None for word in own.values())
    }

    def put(found: re.Match[str]) -> str:
        if found[1] not in words:
            return found[0]
        if found[2] is not None:
            raise UsageError(
                f"--vary {found[1]} and {{{found[1]}:…}} both give words; leave out one"
            )
        return f"{{{found[1]}:{write_words(words[found[1]])}}}"

    try:
        placed = [command and parse_command(_PLACE.sub(put, command)) for command in commands]
    except ValueError as error:
        raise UsageError(f"--command with the words of --vary: {error}") from None
    return {name: [*own] for name, own in read.items()}, placed


def hide_words(command: str) -> str:
    """Return a command without the script's own words in its placeholders, as a sentence has it.

    >>> hide_words("t.py {precision:fp32=,bf16-amp=--amp} {lr}")
    't.py {precision} {lr}'
    """
    return _PLACE.sub(r"{\1}", command)


def fill_places(command: str, values: Mapping[str, str], spell: Callable[[str, str], str]) -> str:
    """Return the command of a case. ``values`` has a text for each placeholder; those without words
    of the script's own are quoted as one word. ``spell`` writes a placeholder's value as
    ``values`` does, which may be given in other words. Raises ValueError: a value has no word
    there.

    >>> values = {"precision": "fp32", "lr": "1"}
    >>> fill_places("t.py {precision:fp32=-q,bf16=--amp} {lr}", values, lambda name, text: text)
    't.py -q 1'
    """

    def fill(found: re.Match[str]) -> str:
        value = values[found[1]]
        if found[2] is None:
            return shlex.quote(value)
        words = _read_words(found[2])
        known = {spell(found[1], text): word for text, word in words.items()}
        if value not in known:
            there = ", ".join(words)
            raise ValueError(
                f"{{{found[1]}:…}} has no word for {value}; it has {there}: add {value}=…"
            )
        return known[value]

    return _PLACE.sub(fill, command)


def split_command(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables set before a filled command, as ``A=1 python t.py`` sets A, and its
    words."""
    variables, words = dict[str, str](), shlex.split(command)
    while words and (found := _ASSIGNED.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words.pop(0)
    return variables, words


def refuse_program(command: str) -> str:
    """Return why a filled command cannot be started here; empty if it can."""
    variables, words = split_command(command)
    program, *rest = words or [""]  # of which a placeholder was all
    if shutil.which(program, path=variables.get("PATH", os.environ.get("PATH"))) is None:
        fix = "give its path, or python SCRIPT" if program.endswith(".py") else "give its path"
        return f"{program!r} is no program that can be run here; {fix}"
    python = Path(program).name.startswith(("python", "torchrun", "accelerate"))
    script = next((word for word in rest if word.endswith(".py")), "") if python else ""
    if script and "-m" not in rest and not Path(script).is_file():
        return f"there is no file {script}; give its path from this folder"
    return ""


def ask_for_seed(command: str | None) -> str:
    """Return what a sentence about other seeds adds of a command without ``{seed}``, whose script
    draws the same ones again unless it draws its own; empty of all else."""
    reaches = command is None or "seed" in list_places(command)
    return "" if reaches else " ({seed} in --command tells them to the script)"


def name_command(command: str) -> str:
    """Return a short name for what a command trains: its script, or its module or program.

    >>> name_command("A=1 python -u src/train.py -b 4"), name_command("torchrun --nproc 2 -m m.n")
    ('train.py', 'm.n (command)')
    >>> name_command("python 'my train.py'"), name_command("sh -c 'cd src && python train.py'")
    ('my-train.py', 'train.py')
    """
    text = _PLACE.sub("x", command)
    words = split_command(text)[1]
    # a whole word may have spaces; the last text has what a shell is given with a quote in it
    texts = [*_list_words(text), " ".join(words)]
    script = next((found[0] for found in map(_SCRIPT.search, texts) if found), "")
    name = words[words.index("-m") + 1] if "-m" in words[:-1] and not script else script or words[0]
    plain = re.sub(r"[^\w.+-]", "-", Path(name).name)
    return plain if script else f"{plain} (command)"


def runs_from(command: str, name: str) -> bool:
    """Return whether the values of a placeholder are folders that the code comes from which a
    command runs, as of two checkouts: that of its script, or one that it enters or imports from.

    >>> runs_from("python {tree}/train.py {depth}", "tree")
    True
    >>> runs_from("python {tree}/train.py {depth} -d {data}/a.csv", "data")
    False
    """
    text = _PLACE.sub(lambda found: "\0" if found[1] == name else "x", command)
    script = next((word for word in _list_words(text) if word.endswith((".py", ".sh"))), "")
    imported = re.search(r"""(?:\bPYTHONPATH=|\bcd\s)\S*\0""", text)
    return bool(imported) or "\0" in script.rpartition("/")[0]


def list_named(command: str) -> list[Path]:
    """Return the programs and configurations that a command names outside of its placeholders: its
    script, or ``-m`` module, and FILE in ``--config=FILE``, also within ``sh -c '…'``."""
    found = dict[Path, None]()
    words = _list_words(_PLACE.sub("\0", command))
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            module = word.replace(".", "/")
            found |= dict.fromkeys(map(Path, (f"{module}.py", f"{module}/__main__.py")))
        elif "\0" not in word and (path := word.rpartition("=")[2]).endswith(TEXTS):
            found[Path(path)] = None
    return [path for path in found if path.is_file()]


def _list_words(command: str) -> list[str]:
    """Return the words of a command, and in place of what it gives to a shell those of that."""
    words, given = list[str](), split_command(command)[1]
    for before, word in zip(["", *given], given, strict=False):
        with suppress(ValueError):  # a text with a quote
            words += _list_words(word) if re.fullmatch(r"-\w*c", before) else [word]
    return words


def refuse_places(
    command: str, given: Collection[str], own: Sequence[str], axes: Sequence[str]
) -> str:
    """Return what is wrong with the placeholders of a command, and what would be right; empty if
    nothing is.

    ``given`` are the axes with values, ``own`` the names of ``--vary``, and ``axes`` all that a
    placeholder may name.
    """
    # not in `parse_command`, which reads rows too: a row of before would refuse its whole folder
    for found in _PLACE.finditer(command):
        for word in _read_words(found[2]).values() if found[2] is not None else ():
            if why := _refuse_words(command[: found.start()] + word + command[found.end() :]):
                return f"{{{found[1]}}}: {why}"
    places = dict.fromkeys(list_places(command))
    for name in places:
        if name == OUT:
            continue
        if name in OF_HARNESS and name not in own:
            return (
                f"{{{name}}}: {axis_flag(name)} is for what the harness does, and no word of a "
                f"command; give a setting of the script another name: --vary own_{name} …"
            )
        if name not in axes and name not in own:
            near = nearest(name, [*own, *axes], f"add --vary {name} VALUE …")
            return f"{{{name}}} is neither an axis nor a --vary; {near}"
        if name not in (*given, *own, "device", "seed"):  # a run has one of the last two
            return f"{{{name}}} has no value; give {axis_flag(name)} VALUE …"
    for name in own:
        if name in axes:
            return f"--vary {name}: this is an axis; give {axis_flag(name)} VALUE …"
        if name not in places:
            return f"--vary {name} is given, but the command has no {{{name}}}; add it there"
    for name in given:
        if name not in (*places, *BESIDE_COMMAND):
            if (dashed := f"{{{name.replace('_', '-')}}}") in command:
                return f"{dashed} is no placeholder; write {{{name}}}"
            return (
                f"{axis_flag(name)} is given, but the command has no {{{name}}}; add it there, or "
                f"leave out {axis_flag(name)}"
            )
    return ""
