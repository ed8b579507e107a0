"""Whether a step ran in the number format of its label: proven, unproven or invalid.

Two things are looked at. Of a training of this harness `bench.training.proof` measures how single
layers round, which must be no coarser than the label. Of any training the operations of a step are
counted, and most of their FLOP must read the label's format. Nothing tells how a command's products
of float32 are rounded, so that torch's flags decide there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.base.text import name_first
from bench.schema.case import Case
from bench.schema.precision import LEAST_LABELLED, Arithmetic, find_formats, list_formats
from bench.schema.work import COMPUTING, Label, Work

_HAS_TF32 = (8, 0)  # compute capability
_IEEE = (
    "torch.backends.cudnn.conv.fp32_precision and torch.backends.cuda.matmul.fp32_precision to "
    "'ieee' in the script"
)


class Standing(StrEnum):
    PROVEN = "proven"
    UNPROVEN = "unproven"
    INVALID = "invalid"


@dataclass(frozen=True)
class Judgement:
    """``share`` is that of the FLOP that ran in the label's format, None if that is not known;
    ``reason`` says why the standing is another than proven."""

    standing: Standing
    share: float | None
    reason: str = ""


def share_arithmetic(work: Mapping[Label, Work], flags: Mapping[str, str]) -> dict[str, float]:
    """Return the share of a step's FLOP by number format, the largest first. What reads float32,
    and may run in TF32 by torch's ``flags`` of convolutions and of other products, if any, is
    ``tfloat32``; empty if nothing was multiplied."""
    flop = dict[str, float]()
    for label, one in work.items():
        if label.kind in COMPUTING and one.flop > 0:
            rounds = flags.get("conv" if "conv" in label.kind else "matmul") == "tf32"
            tf32 = rounds and label.format == "float32"
            name = str(Arithmetic.TFLOAT32) if tf32 else label.format
            flop[name] = flop.get(name, 0.0) + one.flop
    whole = sum(flop.values())
    return {name: flop[name] / whole for name in sorted(flop, key=flop.__getitem__, reverse=True)}


def judge_parts(
    parts: Sequence[Mapping[Label, Work]],
    case: Case,
    flags: Mapping[str, str],
    capability: tuple[int, ...],
    unseen: Sequence[str],
) -> Judgement:
    """Judge the label of a case by the parts of a step, of which it is not known how often each
    runs, as `judge_label` each: if all that multiply agree, any mixture of them does. The share is
    the lowest of a label that holds, and the highest of one that does not."""
    multiply = [part for part in parts if share_arithmetic(part, {})] or [{}]
    found = [judge_label(part, case, flags, capability, unseen) for part in multiply]
    standings = {one.standing for one in found}
    if len(standings) > 1:
        why = "the number formats of compiled code differ, and how often each runs is not known"
        return Judgement(Standing.UNPROVEN, None, why)
    end = min if standings == {Standing.PROVEN} else max
    return end(found, key=lambda one: one.share or 0.0)


def judge_label(
    work: Mapping[Label, Work],
    case: Case,
    flags: Mapping[str, str] | None = None,
    capability: tuple[int, ...] | None = None,
    unseen: Sequence[str] = (),
) -> Judgement:
    """Judge the label of a case by the work of one step.

    Args:
        flags: torch's flags of products of float32; None if a probe tells how they are rounded.
        capability: the GPU's compute capability; None if not known, which TF32 is then supposed of,
            and (0, 0) on a CPU.
        unseen: names what ran beside the operations that were counted.
    """
    if unseen:
        names = name_first(unseen, 3)
        return Judgement(Standing.UNPROVEN, None, f"operations of {names} are not counted")
    has_tf32 = case.device == "cuda" and (capability or _HAS_TF32) >= _HAS_TF32
    shares = share_arithmetic(work, flags or {} if has_tf32 else {})
    if not shares:
        return Judgement(Standing.UNPROVEN, None, "a step multiplies nothing")
    precision = find_formats(case.precision, case.opt_level)
    is_tf32 = flags is not None and precision.arithmetic is Arithmetic.TFLOAT32
    formats = (str(precision.arithmetic),) if is_tf32 else list_formats(precision)
    labelled = sum(shares.get(name, 0.0) for name in formats)
    if labelled >= LEAST_LABELLED:
        return Judgement(Standing.PROVEN, labelled)
    ran = next(name for name in shares if name not in formats)
    what = f"{100 * shares[ran]:.0f} % of the FLOP of a step "
    if Arithmetic.FLOAT32 in formats and ran == Arithmetic.TFLOAT32:
        what += f"may run in TF32, torch's default for convolutions; label it tf32, or set {_IEEE}"
    elif is_tf32 and ran == Arithmetic.FLOAT32:
        off = "torch's TF32 was off; set " + _IEEE.replace("ieee", "tf32")
        what += f"ran in float32: {off if has_tf32 else 'this device has no TF32'}"
    else:
        named = "TF32" if ran == Arithmetic.TFLOAT32 else ran
        read = "float32" if ran == Arithmetic.TFLOAT32 else ran
        those = [one for one in work if one.format == read and one.kind in COMPUTING]
        most = max(those, key=lambda label: work[label].flop)
        what += f"ran in {named} (most of it in {most.kind.meaning}: {most.operation})"
    return Judgement(Standing.INVALID, labelled, f"labelled {case.precision}, but {what}")
