"""`python -m bench.doctor`: check what this machine can measure, and how to fix the rest.

The facts are gathered by `bench.workers.examination` and assessed by `bench.workers.judgement`. The
return code is 1 if something makes numbers unreliable, such as another process that computes on the
card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.base.errors import UsageError, choose
from bench.base.plain import dump_document
from bench.base.processes import leave
from bench.base.progress import watch
from bench.base.text import clean
from bench.doctor.trust import check_trust
from bench.machine.host import has_cuda, refuse_missing
from bench.schema.flags import Parser, add_format, command
from bench.sweep.preflight import refuse_unwritable
from bench.workers.examination import Machine, examine
from bench.workers.judgement import Remark, Severity, judge
from bench.workers.rating import measure_machine

_MARKS = {Severity.FINE: "ok", Severity.NOTE: "note", Severity.UNBELIEVABLE: "WRONG"}


def write_text(_: Machine, findings: Sequence[Remark]) -> str:
    """Return the findings as text: a line each, with the fix below it, and a summary at the end."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]:<6}{finding.topic:<{width}}  {clean(finding.what)}")
        if finding.fix:
            lines.append(f"{'':<{6 + width}}  fix: {clean(finding.fix)}")
    levels = Counter(finding.level for finding in findings)
    wrong = f"make numbers from this machine unreliable: {levels[Severity.UNBELIEVABLE]}"
    return "\n".join([*lines, "", f"{wrong}; notes: {levels[Severity.NOTE]}\n"])


def write_json(machine: Machine, findings: Sequence[Remark]) -> str:
    """Return facts and findings as JSON; what is not known is left out."""
    facts = asdict(
        machine, dict_factory=lambda pairs: {name: one for name, one in pairs if one is not None}
    )
    remarks = [{**asdict(f), "level": f.level.name.lower()} for f in findings]
    return dump_document("doctor", 1, {"facts": facts, "findings": remarks})


@command
def main(argv: Sequence[str]) -> int:
    """Examine the machine, or try it. Return 0, 1 if something makes numbers unreliable, or 2 for a
    usage error."""
    parser = Parser(
        prog="python -m bench.doctor",
        description="Say what this machine can measure, and the command that fixes what it cannot.",
        epilog="Return code 1: something makes numbers unreliable. 2: a wrong flag.",
    )
    add = parser.add_argument
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is (./data)")
    add("--out", type=Path, metavar="DIR", help="where results go (./results)")
    add_format(parser)
    add(
        "--trust",
        action="store_true",
        help="instead, check by short trainings whether rows of this machine can be believed: at "
        "most four minutes on a GPU",
    )
    add("--device", metavar="NAME", help="with --trust: cuda or cpu")
    add("--allow-shared", action="store_true", help="with --trust: a GPU that others use")
    given = parser.parse(argv)
    write = choose("--format", given.format, {"text": write_text, "json": write_json})
    if given.trust:
        device = given.device or ("cuda" if has_cuda() else "cpu")
        out = given.out or Path("results/trust")
        refuse_unwritable(out)
        return int(bool(check_trust(device, out, given.allow_shared)))
    if given.device or given.allow_shared:
        raise UsageError("--device and --allow-shared are for --trust; add it, or leave them out")
    refuse_missing(["psutil"])
    machine = examine(data_dir=given.data_dir, out=given.out)
    with watch("measuring what this machine can do now"):
        machine = measure_machine(machine)
    findings = judge(machine)
    print(write(machine, findings), end="")
    return int(any(finding.level is Severity.UNBELIEVABLE for finding in findings))


if __name__ == "__main__":
    leave(main())
