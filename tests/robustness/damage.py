"""Bad values, and ways in which files are damaged, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

HUGE = [2**31, 2**53, 2**63 - 1, 2**63, 2**64, 2**200, 10**5000]
ODD_NUMBERS = [
    *("0", "-1", "1e400", "-0.0", "nan", "inf", "-inf", "1e-400", "0x10", "1_000", "٣", "5e-6"),
    *("1:30", "010", "+1", ".5", "1.", "1,5", "9" * 5000, "1" * 100_000),
]
ODD_TEXTS = [
    *("", " ", "\t", "\n", "null", "~", "true", "yes", "[]", "{}", "[1, 2]", "2026-11-21"),
    *("2026-19-45", "a\0b", "\x1b[31m", "\ud800", "\udcff", "x" * 300, "y/" * 3000, "/", "."),
    *("..", "random", "a" * 100_000, "\u2028", "名前", "-", "--", "--steps", "%s", "{0}", "$HOME"),
    *("!!python/object:os.system", "*a", "&a", "<<", "?", ":", "#", "'", '"', "\\", "/dev/null"),
    *("/dev/zero", "/proc/self/mem"),
]


@st.composite
def notations(draw: st.DrawFn) -> str:
    """A number in any base and notation that YAML, Python or a person has, of any length."""
    prefix, digits = draw(
        st.sampled_from(
            [("0x", "0123456789abcdefABCDEF"), ("0b", "01"), ("0o", "01234567"), ("0", "01234567"),
             ("", "0123456789"), ("0X", "f"), ("1", "0")]
        )
    )  # fmt: skip
    length = draw(st.sampled_from([1, 2, 5, 19, 300, 4300, 4301, 100_000]))
    some = draw(st.text(alphabet=digits, min_size=1, max_size=8))
    number = prefix + (some * (length // len(some) + 1))[:length]
    between = draw(st.sampled_from(["", "", "_", ":", ",", ".", "e", " "]))
    if between:
        at = draw(st.integers(1, min(len(number), 12)))
        number = between.join(number[i : i + at] for i in range(0, min(len(number), 6000), at))
    return draw(st.sampled_from(["", "-", "+", "- "])) + number


texts = st.one_of(
    notations(),
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_TEXTS),
    st.integers().map(str),
    st.integers(1, 40).map(lambda bits: str(2**bits)),
    st.floats().map(str),
    st.text(max_size=20),
)
"""What stands on a command line."""

VARIABLES = (
    *("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES", "JAX_DEFAULT_MATMUL_PRECISION"),
    *("JAX_LOG_COMPILES", "JAX_THREEFRY_PARTITIONABLE", "JAX_DEBUG_NANS", "XLA_FLAGS", "LANG"),
    *(
        "OMP_NUM_THREADS",
        "POPXL_CACHE_DIR",
        "POPXL_CACHE_GB",
        "POPXL_VERIFY",
        "POPXL_CHECK",
        "POPXL_STEPS",
        "POPXL_STEPWISE",
        "POPART_DOT_CHECKS",
        "JAX_LOCAL_DEVICE_IDS",
        "XDG_CACHE_HOME",
        "HOME",
        "NETRC",
        "NO_COLOR",
        "MODEL_LOG_LEVEL",
        "COLUMNS",
        "TERM",
    ),
    *("HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "MPLBACKEND", "TMPDIR"),
    *("CUDA_VISIBLE_DEVICES", "WANDB_MODE", "WANDB_SILENT", "PYTHONWARNINGS"),
)
"""Environment variables that something here reads; not those that make it one of several processes,
which would be waited for."""

environments = st.dictionaries(
    st.sampled_from(VARIABLES),
    st.one_of(
        st.sampled_from(
            [
                "",
                "0",
                "1",
                "true",
                "maybe",
                "cpu",
                "cuda",
                "cpu,foo",
                "offline",
                "nan",
                "~",
                "~nobody",
            ]
        ),
        st.sampled_from(["--xla_no_such_flag=1", "--xla_cpu_enable_fast_math=maybe", "xla", "--"]),
        texts.filter(lambda text: "\0" not in text and "\ud800" not in text),
    ),
    min_size=1,
    max_size=2,
)

ODD_YAML = [
    *("[a, b]", "{a: b}", "[[[[1]]]]", "!!set {a}", "!!binary aGk=", "!!int 3", "!!str 3", "!x 3"),
    *("!!python/name:os.system", "&a 3", "*a", "|\n   text", ">-\n   text", "2026-11-21 10:00:00"),
    *("{" * 300 + "}" * 300, "[" * 5000, "? a", "'open", '"\\ud800"', '"\\0"', '"\\x07"'),
    *(
        "[" + "1, " * 20_000 + "1]",
        "@",
        "`",
        "%",
        "- 1",
        "a: b: c",
        "0b101",
        "0o7",
        ".inf",
        "<<: {}",
    ),
]

yaml_values = st.one_of(
    texts.filter(lambda text: "\ud800" not in text and "\udcff" not in text),
    st.sampled_from(ODD_YAML),
    st.sampled_from(HUGE[:-1]).map(str),
)
"""What stands in place of a value of a YAML file."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE[:-1]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content of a file after something happened to it."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "zeros", "double", "whole", "swap"]))
    at = draw(st.integers(0, len(content)))
    end = min(len(content), at + draw(st.integers(1, 40)))
    match kind:
        case "flip" if content:
            at = min(at, len(content) - 1)
            return (
                content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
            )
        case "cut":
            return content[:at]
        case "insert":
            return content[:at] + draw(st.binary(max_size=20)) + content[at:]
        case "zeros":
            return content[:at] + bytes(end - at) + content[end:]
        case "double":
            return content[:end] + content[at:]
        case "whole":
            return draw(st.sampled_from(WHOLE))
    return content[end:] + content[:at]


WHOLE: Sequence[bytes] = (
    *(b"", b"\0" * 100, b"{", b"[]", b"null", b"{}", b"3", b'"text"', b"\xff\xfe{\0}\0"),
    *(b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\n" * 1000),
    *(b'{"a": 1, "a": 2}', b"NaN", b'{"content": 1e999}', b'{"step": 1' + b"0" * 5000 + b"}"),
    *(b'"\\ud800"', b"PK\x03\x04", b"\x80\x04\x95", "{\u2028}".encode()),
)


def replaced_somewhere(draw: st.DrawFn, data: Any) -> Any:
    """JSON data with one value, at any depth, replaced, removed or renamed."""
    if not isinstance(data, dict | list) or not data or draw(st.integers(0, 3)) == 0:
        return draw(json_values)
    if isinstance(data, list):
        at = draw(st.integers(0, len(data) - 1))
        return [replaced_somewhere(draw, v) if i == at else v for i, v in enumerate(data)]
    name = draw(st.sampled_from(sorted(data)))
    match draw(st.sampled_from(["deeper", "deeper", "deeper", "removed", "renamed"])):
        case "removed":
            return {k: v for k, v in data.items() if k != name}
        case "renamed":
            return {(draw(st.text(max_size=8)) if k == name else k): v for k, v in data.items()}
    return {k: replaced_somewhere(draw, v) if k == name else v for k, v in data.items()}


@st.composite
def replaced(draw: st.DrawFn, data: Any) -> Any:
    """See `replaced_somewhere`."""
    return replaced_somewhere(draw, data)
