"""How answers are written: one spelling for each value, and plain numbers read exactly.

Nothing here imports SymPy, so the training process settles most answers (integers, decimals, simple fractions,
identical text) by itself within microseconds. Every pattern runs in time linear in its input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

#: Relative distance up to which a decimal stands for a value whose own decimal expansion never ends.
DECIMAL_TOLERANCE = Fraction(1, 10_000)

#: Golds that stand for "there is no answer here". Compared without case, spaces and a final period.
UNREADABLE_GOLDS = frozenset({
    "see figure", "see the figure", "see diagram", "see the diagram", "see image", "see picture", "see graph",
    "see table", "see above", "see below", "see solution", "see explanation", "see proof", "figure", "proof",
    "proof required", "answer not available", "not available", "no answer", "no answer available", "not applicable",
    "not provided", "answer missing", "missing", "unknown", "tbd", "todo", "n/a", "na", "null", "nan",
})  # fmt: skip

_SPACES = re.compile(
    r"\\[,;:!> ]|\\q?quad\b|\\thinspace\b|\\ |~|[\s\u00a0\u2000-\u200b\u202f\u205f\u3000\ufeff]+"
)
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "°": r"^\circ ",
        "º": r"^\circ ", "≈": r"\approx ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "，": ",", "：": ":", "（": "(", "）": ")", "％": "%", "’": "'", "\x00": "",
    }
)  # fmt: skip
_REWRITES = [
    (re.compile(p), r)
    for p, r in [
        (r"\\\((.*?)\\\)|\\\[(.*?)\\\]", r"\1\2"),
        (r"\\(?:d|t|c)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|displaystyle|textstyle|limits)(?![a-zA-Z])\.?", ""),
        (r"\\(?:textbf|textit|textrm|textsf|textnormal|mbox|hbox|emph|textup|textsc)(?![a-zA-Z])", r"\\text"),
        (r"\\(?:mathbf|mathrm|mathit|mathsf|boldsymbol|bm|bold)(?![a-zA-Z])", r"\\text"),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\(?:langle|lparen)(?![a-zA-Z])", "("),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\(?:rangle|rparen)(?![a-zA-Z])", ")"),
        (r"\\(?:ast)(?![a-zA-Z])", r"\\cdot "),
        (r"\\phantom(?![a-zA-Z])\s*(?:\{[^{}]*\})?|\\(?:no)?(?:linebreak|number)(?![a-zA-Z])", ""),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\\(?:text)?color ?\{\w*\}", ""),
        (r"(?<!\w)(?:np|numpy|math)\.(?=[a-z])", ""),
        (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
        (r"<<[^<>]*>>", ""),  # GSM8K's calculator marks
        # 12{,}600 · 12,\!600 · 12\,600 · 12 600: a separator between three-digit groups belongs to the number
        (r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d{3}(?!\d))", ""),
    ]
]  # fmt: skip
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/^_{])[1-9]\d{0,2}(?: \d{3})+(?![\d/]| ?\\frac)")
_COMMA_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_DISPLAY = re.compile(r"^(?:\*\*|__|`)+|(?:\*\*|__|`)+$")


def tidy(text: str) -> str:
    r"""The same answer in one spelling: no dollar signs or spacing commands, ``\frac`` for ``\dfrac``, plain spaces.

    Only differences without meaning disappear: a space between digits stays, and so does a currency sign
    (as ``\$``). A closing period goes.
    """
    text = text.translate(_UNICODE)
    if "matrix" not in text and "array" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z]|\s*$)", lambda m: "\\" if m.end() < len(text.rstrip()) else "", text)
    # Spacing commands between digits separate thousands (12\,600, 12\;600); elsewhere they are spaces.
    text = re.sub(r"(?<=\d)\\!", "", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\\$|(?<!\\)\$(?=\s*\d[\d,.]*\s*$)", "€", text).replace("$", "")
    text = _SPACES.sub(" ", text.replace(r"\\", "\x01")).replace("\x01", r"\\")
    text = _DISPLAY.sub("", text.strip()).strip()
    text = _SPACED_THOUSANDS.sub(lambda m: m[0].replace(" ", ""), text)
    if text.endswith((".", ",", ";", ":")) and not text.endswith(".m."):
        text = text[:-1].rstrip()
    return text


def join_thousands(text: str) -> str:
    """Drop the commas of ``12,600``. For text outside brackets: ``(12,600)`` is a pair."""
    return _COMMA_THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def compact(text: str) -> str:
    r"""A key under which tidy spellings of one thing meet: ``\frac34`` and ``\frac{3}{4}``, with or without spaces."""
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\s*([A-Za-z0-9])", r"\1{\2}", text)
    return re.sub(r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", "", text)


def words(text: str) -> str:
    r"""Text without case, spaces, ``\text`` and braces, as text answers are compared."""
    text = re.sub(r"\\text(?![a-zA-Z])|[{}$*]", "", text)
    return re.sub(r"\s+", "", text).strip(".,:;").casefold()


@dataclass(frozen=True)
class Plain:
    """A number read exactly: its value, and how it was written."""

    value: Fraction
    decimal: bool = False  # written with a decimal point or a power of ten
    percent: bool = False  # 45 % has value 45 here


_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?) ?€? ?(?P<sign2>-?)(?:(?P<whole>\d+) )?"
    rf"(?:(?P<number>{_NUMBER})(?:(?P<e>[eE][-+]?\d{{1,3}})"
    r"| ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?(?:\{ ?(?P<p1>[-+]?\d{1,3}) ?\}|(?P<p2>-?\d{1,3})))?"
    r"(?: ?/ ?(?P<den>\d+))?"
    r"|\\frac ?(?:\{ ?(?P<fn>-?\d+) ?\}|(?P<fn1>\d)) ?(?:\{ ?(?P<fd>\d+) ?\}|(?P<fd1>\d)))"
    r" ?(?P<percent>\\?%)?"
)
_PLAIN_LIMIT = 80  # characters: everything longer goes to a worker


def plain_number(text: str) -> Plain | None:
    """Read a tidy text that is one number (integer, decimal, power of ten, fraction, mixed number, percentage).

    Exact and bounded: at most 80 characters and exponents of three digits. None for everything else.
    """
    if len(text) > _PLAIN_LIMIT or not (m := _PLAIN.fullmatch(text)):
        return None
    exponent = m["e"][1:] if m["e"] else m["p1"] or m["p2"]
    if m["number"] is not None:
        top, bottom, decimal = m["number"], m["den"], "." in m["number"] or exponent is not None
        if bottom is not None and decimal:
            return None
        value = Fraction(top.replace(",", "").rstrip(".") if not top.startswith(".") else "0" + top)
        decimal = decimal and not (top.endswith(".") and exponent is None)
        value *= Fraction(10) ** int(exponent) if exponent else 1
    else:
        value, bottom, decimal = Fraction(int(m["fn"] or m["fn1"])), m["fd"] or m["fd1"], False
    if bottom is not None:
        if int(bottom) == 0:
            return None
        value /= int(bottom)
    if m["whole"] is not None:  # 3 1/2: only a proper fraction makes a mixed number
        if bottom is None or not 0 < value < 1:
            return None
        value += int(m["whole"])
    return Plain(
        -value if (m["sign"] == "-") != (m["sign2"] == "-") else value, decimal, m["percent"] is not None
    )


def terminates(value: Fraction) -> bool:
    """Whether the decimal expansion of a rational ends."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def same_plain(gold: Plain, answer: Plain, tolerance: Fraction | None = None) -> bool:
    """Equality of two plain numbers under the answer policy; ``tolerance`` is absolute."""
    pairs = [(gold, answer)]
    if gold.percent != answer.percent:  # 45 % against 45 or 0.45
        marked = gold if gold.percent else answer
        hundredth = Plain(marked.value / 100, marked.decimal)
        pairs.append((hundredth, answer) if gold.percent else (gold, hundredth))
    for one, other in pairs:
        if one.value == other.value:
            return True
        difference = abs(one.value - other.value)
        if tolerance is not None and difference <= tolerance:
            return True
        for written, exact in ((one, other), (other, one)):
            endless = written.decimal and not exact.decimal and not terminates(exact.value)
            if endless and difference <= DECIMAL_TOLERANCE * abs(exact.value):
                return True
    return False


def unreadable(gold: str) -> str | None:
    """Why a gold cannot be read at all, or None. Everything else is a value or a text."""
    plain = re.sub(r"\s+", " ", re.sub(r"\\text(?![a-zA-Z])|[{}$]", "", gold)).strip(" .").casefold()
    if not plain:
        return "empty"
    if plain in UNREADABLE_GOLDS or gold.strip() in ("None", "[]"):
        return f"placeholder {gold.strip()!r}"
    if not re.search(r"\w|\\infty|\\emptyset|\\varnothing|∞|∅", plain):
        return "no letter and no digit"
    depth = 0
    for brace in re.findall(r"\\.|[{}]", gold, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            break
    return "braces do not match" if depth else None
