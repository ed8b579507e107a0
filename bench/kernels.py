"""What the name of a kernel says of it: which operations Inductor fused in it, or what it is of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from bench.work import Kind, Label


@dataclass(frozen=True)
class Vocabulary:
    """What torch knows of its operations; `bench.training.counting.read_vocabulary` asks it.

    Attributes:
        kind: of an operation's `base_name`.
        free: whether one touches no element: a view, or memory that is only set aside.
        wraps: whether one does nothing but call others, by its name with namespace.
    """

    kind: Callable[[str], Kind]
    free: Callable[[str], bool]
    wraps: Callable[[str], bool]


_HEAVIEST = (
    Kind.ATTENTION,
    Kind.NORMALISATION,
    Kind.REDUCTION,
    Kind.LOSS,
    Kind.OPTIMIZER,
    Kind.INDEXING,
    Kind.CONCATENATION,
    Kind.ELEMENTWISE,
    Kind.CAST,
    Kind.LAYOUT,
    Kind.COPY,
)
_PRODUCTS = {
    Kind.MATMUL: ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    Kind.CONVOLUTION: ("convolution", "convolution_backward"),
    Kind.ATTENTION: ("flex_attention", "flex_attention_backward"),
}
_BROUGHT = frozenset(name for products in _PRODUCTS.values() for name in products)


def is_fused(name: str) -> bool:
    return "cpp_fused_" in name or (name.startswith("triton_") and "_fused_" in name)


def label_fused(name: str, vocabulary: Vocabulary) -> Label:
    """The label of a kernel that Inductor made, by the operations in its name.

    All of its time goes to one kind, the first of `_HEAVIEST` that is among them: what is fused
    passes over memory as often as that operation does, and the others ride along. A product is in
    the name of a template; elsewhere it stands for what its inputs or outputs were brought into, a
    layout.
    """
    head, _, tail = name.partition("_fused_")
    names = _split_names(tail, vocabulary)
    operation = " + ".join(names) or tail
    if head.endswith(("_tem", "template")):
        for kind, products in _PRODUCTS.items():
            if any(one in products for one in names):
                return Label(kind, operation)
    special = {"_to_copy": Kind.CAST, **dict.fromkeys((*_BROUGHT, "clone", "permute"), Kind.LAYOUT)}
    kinds = {special.get(one) or vocabulary.kind(one) for one in names}
    return Label(next((kind for kind in _HEAVIEST if kind in kinds), Kind.OTHER), operation)


def _split_names(text: str, vocabulary: Vocabulary) -> list[str]:
    """The operations in a fused kernel's name, each once; what is none of them is left out."""

    def find(name: str) -> str:
        """The operation that this is the name of; empty for none."""
        for known in (name, name.removesuffix("_functional")):
            if not known or known.isdigit():
                continue
            listed = known in _BROUGHT or known == "_to_copy" or vocabulary.free(known)
            if listed or vocabulary.kind(known) is not Kind.OTHER:
                return known
        return ""

    words, names = text.split("_"), dict[str, None]()
    while words:
        longest = range(len(words), 0, -1)
        found = ((find("_".join(words[:end]).rstrip("_")), end) for end in longest)
        name, end = next((one for one in found if one[0]), ("", 1))
        names[name], words = None, words[end:]
    names.pop("", None)
    # views and constants move nothing
    return [n for n in names if not vocabulary.free(n)] or list(names)


CONVERSIONS = ("genericTranspose", "nchwToNhwc", "nhwcToNchw", "tensorTransform")
"""Parts of the names of kernels by which cuDNN and cuBLAS change the memory layout of what they
multiply: of DPN-92's step on an H200 16 % in fp16, 13 % in tf32 and bf16, under 1 % in fp32."""

_KERNELS: dict[str, Kind] = {
    "Memcpy": Kind.COPY,
    "Memset": Kind.COPY,
    "flash": Kind.ATTENTION,
    "fmha": Kind.ATTENTION,
    "wgrad": Kind.CONVOLUTION,
    "dgrad": Kind.CONVOLUTION,
    "fprop": Kind.CONVOLUTION,
    "conv": Kind.CONVOLUTION,
    "batch_norm": Kind.NORMALISATION,
    "bn_": Kind.NORMALISATION,
    "layer_norm": Kind.NORMALISATION,
    "gemm": Kind.MATMUL,
    "gemv": Kind.MATMUL,
    "cutlass": Kind.MATMUL,
    "nvjet": Kind.MATMUL,  # cuBLAS on Hopper, by which cuDNN computes 1×1 convolutions too
    **dict.fromkeys(CONVERSIONS, Kind.LAYOUT),
    "multi_tensor_apply": Kind.OPTIMIZER,
    "reduce": Kind.REDUCTION,
    "CatArray": Kind.CONCATENATION,
    "index": Kind.INDEXING,
    "elementwise": Kind.ELEMENTWISE,
}
"""The kind of a kernel that no operator launched, such as one of a CUDA graph; the first fits."""


def label_kernel(name: str, vocabulary: Vocabulary) -> Label:
    if is_fused(name):
        return label_fused(name, vocabulary)
    kind = next((kind for part, kind in _KERNELS.items() if part in name), Kind.OTHER)
    return Label(kind, _split_kernel(name)[0].partition(" (")[0])


LONGEST = 200
"""Letters of a kernel's name that are kept; cuDNN's own, which have no templates, reach 180."""

MOST_WORDS = 3
"""Words of a kernel's templates that are kept."""

# number formats, what is around them, and what wraps the function that a kernel of torch's runs
_DULL = re.compile(
    r"(__|nv_)*(half|float|double|int|long|short|char|bool|signed|unsigned|void|b?float16)\d*(_t)?|"
    r"array|const|true|false|operator|OpaqueType|TensorListMetadata|ReduceOp|func_wrapper_t|"
    r"gpu_kernel_impl\w*|[AB]?(Unary|Binary)Functor|TrivialOffsetCalculator|(Load|Store)WithCast",
    re.IGNORECASE,
)
_TENSOR_OPERATION = re.compile("tensorop|w?mma", re.IGNORECASE)


@cache
def shorten_kernel(name: str) -> str:
    """A kernel's name without its arguments, and of its templates a few words that tell it.

    Templates are long for what they say: of CUTLASS the first says all, and of torch's elementwise
    kernels a word deep inside says which function runs. Words of number formats are left out, and
    one that names an operation of tensor cores is always kept.

    >>> shorten_kernel("void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor"
    ...                "<c10::Half>, std::array<char*, 1ul> >(int, at::native::FillFunctor)")
    'at::native::vectorized_elementwise_kernel<FillFunctor>'
    >>> shorten_kernel("void cudnn::bn_bw_1C11_kernel_new<__half, float, 128, true>(float)")
    'cudnn::bn_bw_1C11_kernel_new'
    """
    head, words = _split_kernel(name)
    told = [word for word in dict.fromkeys(words) if not _DULL.fullmatch(word)]
    kept = told[:MOST_WORDS]
    if not any(map(_TENSOR_OPERATION.search, kept)):
        kept += [word for word in told[MOST_WORDS:] if _TENSOR_OPERATION.search(word)][:1]
    short = f"{head}<{', '.join(kept)}>" if kept else head
    return short if len(short) <= LONGEST else f"{short[: LONGEST - 1]}…"


def _split_kernel(name: str) -> tuple[str, list[str]]:
    """A kernel's name up to its templates and arguments, and the words of its templates."""
    if name.startswith("_Z"):
        return _split_mangled(name)
    plain = re.sub(r"\(anonymous namespace\)::|\{lambda[^{}]*\}", "", name.removeprefix("void "))
    # what stands in parentheses after a blank is no argument: Memcpy HtoD (Pageable -> Device)
    head = re.split(r"<|(?<! )\(", plain, maxsplit=1)[0].strip()
    inside, depth = "", 0
    for part in re.split(r"([<>])", plain[len(head) :]):
        depth += {"<": 1, ">": -1}.get(part, 0)
        inside += part
        if depth <= 0 and part == ">":
            break
    while (less := re.sub(r"\([^()]*\)", "", inside)) != inside:
        inside = less
    # of what is defined in an operator() the name is before it
    words = re.findall(r"\b[A-Za-z_]\w*(?=(?:::(?:operator)?)*[^\w:])", inside)
    return head or name, words


_MANGLED = re.compile(r"L\w\d+E|S[\dA-Z]*_|T\d*_|(\d+)")


def _split_mangled(name: str) -> tuple[str, list[str]]:
    """The same of a name that nobody demangled, by the rules of the Itanium C++ ABI: an identifier
    follows its length, and one that another follows directly is its namespace."""
    head: list[str] = []
    words: list[str] = []
    at, closed = 2, False
    while found := _MANGLED.search(name, at):
        at = found.end()
        if found[1]:
            word, at = name[at : at + int(found[1])], at + int(found[1])
            if not closed:
                head.append(word)
                closed = not name[at : at + 1].isdigit()
            elif not name[at : at + 1].isdigit():
                words.append(word)
    return "::".join(head) or name, words
