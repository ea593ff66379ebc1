r"""Reading an answer: from tidy text to a value that can be compared.

The structure of an answer (lists, sets, tuples, intervals, relations, matrices, ratios, dates, units) is read
here; formulas inside it are parsed by the LaTeX grammar that math-verify uses. Runs in a worker process only,
because a hostile formula can take any time and memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from .spelling import Plain, join_thousands, plain_number, tidy, words

LONGEST = 5_000  # characters of an answer; the longest gold of the sets in use has 250


class NotMathematics(ValueError):
    """A text that no rule reads."""


@dataclass(frozen=True)
class Scalar:
    """A number or formula. ``percent``: written with a percent sign, not yet divided by 100."""

    expr: sympy.Basic
    plain: Plain | None = None
    decimal: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Text:
    key: str


@dataclass(frozen=True)
class Parts:
    """Digits, times, dates and ratios: compared part by part. ``kind``: base, clock, date, ratio."""

    kind: str
    parts: tuple
    note: str = ""


@dataclass(frozen=True)
class Items:
    r"""Several values. ``opening``/``closing``: ``""`` for a list, ``\{`` for a set, else round or square brackets."""

    items: tuple
    opening: str = ""
    closing: str = ""
    conjunction: str = ""


@dataclass(frozen=True)
class Matrix:
    rows: tuple


@dataclass(frozen=True)
class Union:
    parts: tuple
    without: tuple = ()


@dataclass(frozen=True)
class Relation:
    """``sides[0] ops[0] sides[1] …``; ``texts`` are the sides as written."""

    sides: tuple
    ops: tuple
    texts: tuple = field(compare=False)


_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING, _CLOSING = {"(", "[", "{", r"\{", r"\begin"}, {")", "]", "}", r"\}", r"\end"}
_NUMBER_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90, "hundred": 100,
}  # fmt: skip
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MONTHS = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
]  # fmt: skip
#: Units short enough to be mistaken for a product of variables. Longer words need no list.
_UNITS = (
    "cm|mm|km|nm|um|dm|in|ft|yd|mi|oz|lb|lbs|kg|mg|ml|mL|kL|dL|Hz|kHz|MHz|GHz|Pa|kPa|MPa|eV|keV|MeV|GeV|kJ|kW|mW|MW|"
    "ms|ns|min|mins|sec|secs|hr|hrs|yr|yrs|mph|kph|kmh|rpm|mol|AU|pc|kpc|Mpc|ly|rad|sr|cal|kcal|ppm|dB|sq|cu|USD|EUR|Rs|"
    "day|days|men|man|pies|pie|eggs|egg|cups|cup|cats|dogs|boys|toys|ways|way|year|box|pens|pen|cars|car|bags|bag|gal|"
    "pts|deg|units|unit|amu|erg|dyn|Wh|kWh|per|pints|inch|feet|foot|mile|yard|hour|week|acre|ton|tons|cent|dime|coin"
)
_COMMANDS = r"(?:sin|cos|tan|cot|sec|csc|log|sqrt|frac|prime|cdot|times|infty)(?![a-z])"
_WORD = rf"(?:(?:{_UNITS})(?![A-Za-z])|(?!{_COMMANDS})[A-Za-z]{{4,}}|of)"
_POWER = r"(?: ?\^ ?(?:\{ ?-?\d ?\}|-?\d))?"
_PLAIN_UNIT = re.compile(
    rf"(?<=[\d)}}\]%€])(?: ?(?:{_UNITS})(?![A-Za-z]){_POWER}| {_WORD}\.?{_POWER})"
    rf"(?:[ /*.-]*(?:{_WORD}\.?|(?<=[/* ])[a-zA-Z](?![A-Za-z])){_POWER})*$"
)
_TEXT_UNIT = re.compile(
    r"(?<=[\w)}\]%€!]) ?(?:/? ?\\text ?\{[^{}]*\} ?(?:\^ ?(?:\{[^{}]*\}|-?\d))? ?)+$"
    r"|(?<=[\w)}\]]) ?\\text ?(?:cm|m|km)$"
)
_DEGREE_SCALE = re.compile(r"\^\\circ ?(?:\\text ?\{ ?)?[CFK]?(?: ?\})?")
# 18 m and 10m/s, but not 6m: a letter that touches its number is a variable.
_LETTER = r"[mgshlLJNVWAKCFTd]"
_SINGLE_LETTER_UNIT = re.compile(
    rf"(?<=[\d)}}])(?: \\text ?{_LETTER}| {_LETTER}(?: ?/ ?{_LETTER})?| ?{_LETTER} ?/ ?{_LETTER}){_POWER}$"
)


def split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Split at tokens outside all brackets; returns the pieces and the separators between them."""
    pieces, found, start, depth = [], [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPENING:
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
        elif depth == 0 and token[0] in separators:
            pieces.append(text[start : token.start()].strip())
            found.append(token[0])
            start = token.end()
    return [*pieces, text[start:].strip()], found


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) where one pair of brackets spans the whole text."""
    tokens = list(_TOKEN.finditer(text))
    if (
        len(tokens) < 2
        or tokens[0][0] not in {"(", "[", "{", r"\{"}
        or tokens[-1][0] not in {")", "]", "}", r"\}"}
    ):
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return None
    return tokens[0][0], text[tokens[0].end() : tokens[-1].start()].strip(), tokens[-1][0]


def _top_level(text: str, change) -> str:
    """Apply a function to the stretches of text outside brackets."""
    out, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPENING:
            if depth == 0:
                out.append(change(text[start : token.start()]))
                start = token.start()
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
            if depth == 0:
                out.append(text[start : token.end()])
                start = token.end()
    rest = text[start:]
    return "".join(out) + (change(rest) if depth == 0 else rest)


def choice(text: str) -> tuple[str | None, str]:
    r"""A choice letter and what follows it: ``(C)``, ``\text{(C)} 12``, ``C: 12``, ``C) 12``."""
    flat = re.sub(r"\\text(?![a-zA-Z])|[{}*]", "", tidy(text)).strip()
    flat = re.sub(r"^(?:option|choice) ", "", flat, flags=re.IGNORECASE)
    if m := re.fullmatch(r"\(?([A-Za-z])\)?\.?", flat):
        return m[1], ""
    if m := re.match(r"(?:\(([A-Z])\)|([A-Z])\s*[:.)])\s*(\S.*)", flat, re.DOTALL):
        return m[1] or m[2], m[3]
    return None, ""


def _when(text: str) -> Parts | None:
    """Dates and times of day."""
    flat = re.sub(r"\\text(?![a-zA-Z])|[{}]", "", text).strip(" .")
    flat = re.sub(r"\s+", " ", flat)
    if m := re.fullmatch(r"(\d{1,2})((?: ?: ?\d{2}){0,2}) ?([ap])\.? ?m\.?", flat, re.IGNORECASE):
        return Parts("clock", (int(m[1]), *map(int, re.findall(r"\d+", m[2]))), m[3].lower())
    if m := re.fullmatch(r"(\d{1,2}) ?: ?(\d{2})(?: ?: ?(\d{2}))?", flat):
        return Parts("clock", tuple(int(part) for part in m.groups() if part))
    if (m := re.fullmatch(r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})", flat)) and sorted(
        len(m[i]) == 4 for i in (1, 3, 4)
    ) == [False, False, True]:
        parts = (int(m[1]), int(m[3]), int(m[4]))
        return Parts("date", parts, "ymd" if len(m[1]) == 4 else "numeric")
    found = re.findall(r"[A-Za-z]+|\d+", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", flat))
    names = [w.lower() for w in found if w.isalpha() and w.lower() not in ("of", "the")]
    numbers = [int(w) for w in found if w.isdigit()]
    months = [
        i for i, m in enumerate(_MONTHS, 1) for n in names if n == m or (len(n) in (3, 4) and m.startswith(n))
    ]
    if len(names) == 1 and len(months) == 1 and 1 <= len(numbers) <= 2 and re.fullmatch(r"[\w\s,.]+", flat):
        day, year = min(numbers), max(numbers) if len(numbers) == 2 else None
        if day <= 31:
            return Parts("date", (year, months[0], day), "ymd")
    return None


def _base(text: str) -> Parts | None:
    m = re.fullmatch(
        r"(-?)(?:\\text ?\{ ?)?([0-9A-Fa-f][0-9A-Fa-f ]*)\}? ?_ ?\{? ?(?:\\text ?\{)?(\w+?)\}?\}?", text
    )
    if not m or not re.search(r"\d", m[2]):
        return None
    base = _NUMBER_WORDS.get(m[3].lower(), int(m[3]) if m[3].isdigit() else 0)
    try:
        return Parts("base", (int(m[1] + m[2].replace(" ", ""), base), base)) if 2 <= base <= 36 else None
    except ValueError:
        return None


def _number_word(text: str) -> int | None:
    parts = [w for w in re.split(r"[\s-]+", text.strip().lower()) if w != "and"]
    if not 1 <= len(parts) <= 3 or any(w not in _NUMBER_WORDS for w in parts):
        return None
    value = 0
    for word in parts:
        value = value * 100 if word == "hundred" and value else value + _NUMBER_WORDS[word]
    return value


_MALFORMED = [
    (re.compile(p), r)
    for p, r in [
        (r"\\frac ?(?=\\)", r"\\frac"),
        (r"\\(frac|binom) ?([0-9a-zA-Z]) ?([0-9a-zA-Z])", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom) ?([0-9a-zA-Z]) ?\{", r"\\\1{\2}{"),
        (r"\\(frac|binom) ?(\{[^{}]*\}) ?([0-9a-zA-Z])", r"\\\1\2{\3}"),
        (r"\\frac ?(\\[a-z]+) ?([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac ?\{([^{}]*)\} ?(\\[a-z]+)(?![{\[])", r"\\frac{\1}{\2}"),
        (r"\\dbinom|\\tbinom", r"\\binom"),
        (r"\\sqrt ?([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt ?(\d+)", r"\\sqrt{\1}"),
        (r"√ ?\(([^()]*)\)|√ ?\{([^{}]*)\}|√ ?(\w+)", r"\\sqrt{\1\2\3}"),
        (r"(?<![\\a-zA-Z])(pi|infty|sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\w}])(\d+) ?(?=\()", r"\1\\cdot "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\^ ?\(([^()]*)\)", r"^{\1}"),
        (r"\^ ?(-\d+)", r"^{\1}"),
        (r"\\lvert|\\rvert|\\vert|\\mid(?![a-z])", "|"),
        (r"\\operatorname ?\{(arcsin|arccos|arctan|sin|cos|tan|log|ln)\}", r"\\\1"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc|log|ln)) \^", r"\1^"),
        (r"(?<=[a-zA-Z\d)}]) !", "!"),
    ]
]  # fmt: skip
_TRIGONOMETRY = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])|(?<![a-z\\])(?:sin|cos|tan|cot|sec|csc)(?![a-z])"
)
_CONVERSION = ConversionConfig(
    interpret_as_mixed_fractions=False, interpret_contains_as_eq=False, lowercase_symbols=False
)


def _fraction(match: re.Match) -> str:
    value = Fraction(match[0] if match[0][0] != "." else "0" + match[0])
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _symbols(text: str) -> str:
    r"""Names that the grammar does not take, or folds together: primes, ``E_1``, ``\gamma``, ``L_{\odot}``."""
    text = re.sub(
        r"([A-Za-z])((?: ?')+|\^ ?\{ ?(?:\\prime ?)+\}|\^ ?\\prime)",
        lambda m: f"{m[1]}_{{{'p' * (m[2].count(chr(39)) + m[2].count('prime'))}}}",
        text,
    )
    text = re.sub(r"\\gamma(?![a-zA-Z])", "G_{gamma}", text)
    text = re.sub(
        r"(\\(?:sum|prod|int|lim|log) ?)?_ ?(?:\{([^{}]*)\}|(\\[a-zA-Z]+|\w))",  # bounds and bases stay
        lambda m: (
            f"{m[1]}_{{{m[2] or m[3]}}}" if m[1] else f"_{{{re.sub(r'[^A-Za-z0-9]', '', m[2] or m[3])}}}"
        ),
        text,
    )
    text = re.sub(r"(?<![a-zA-Z\\])E_\{(\w*)\}", r"Q_{E\1}", text)
    return re.sub(r"\\(dot|ddot|hat|vec|bar|tilde|overline|mathcal|mathbb) ?\{?([A-Za-z]|\\[a-z]+)\}?(?:_\{(\w+)\})?",
                  lambda m: f"K_{{{m[1]}{m[2].strip(chr(92))}{m[3] or ''}}}", text)  # fmt: skip


@lru_cache(maxsize=4096)
def formula(text: str) -> sympy.Basic:
    """Parse one formula; decimals become exact fractions.

    Raises
    ------
    NotMathematics
        The grammar does not accept it.
    """
    source = text
    text = re.sub(r"\\text ?\{ ?([\d.]+) ?\}", r"\1", text)
    text = re.sub(r"\^\\circ ?", "", re.sub(r"(\d+(?:\.\d+)?) ?\^\\circ ?", r"(\\frac{\1 \\pi}{180})", text))
    for pattern, replacement in _MALFORMED:
        text = pattern.sub(replacement, text)
    # A whole number before a proper fraction is a mixed number, unless it is an exponent, an index or a factor.
    text = re.sub(
        r"(?<![\w.^_}!)\\{])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}(?! ?\^)",
        lambda m: (
            rf"({m[1]}+\frac{{{m[2]}}}{{{m[3]}}})"
            if int(m[2]) < int(m[3])
            else rf"{m[1]}\cdot \frac{{{m[2]}}}{{{m[3]}}}"
        ),
        text,
    )
    # Powers of ten as computers write them, then decimals.
    text = re.sub(r"(?<![\w}])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"\d+\.\d+|(?<!\d)\.\d+", _fraction, text)
    text = _symbols(re.sub(r"(?<=\d) (?=\d)|(?<=\d)\.(?!\d)", "", text))
    if (
        "%" in text
        or r"\text" in text
        or re.search(r"(?<![A-Za-z\\{])[A-Za-z]{4,}(?![A-Za-z}])", re.sub(r"\\[a-zA-Z]+", " ", text))
    ):
        raise NotMathematics(source)
    try:
        expr = latex2sympy(text, normalization_config=None, conversion_config=_CONVERSION)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        raise NotMathematics(source) from error
    if not isinstance(expr, sympy.Basic):
        raise NotMathematics(source)
    return expr.xreplace({sympy.Symbol("i"): sympy.I})


def _atom(text: str, bare_units: bool) -> Scalar | Text:
    """A number or formula with its percent sign, currency and units; else a text."""
    source = text
    percent = False
    if m := re.search(
        r" ?(?:\\?%|(?:\\text ?\{)? ?(?:percent|percentage|pct|per cent)(?![a-z]) ?\}?)\.?$", text
    ):
        text, percent = text[: m.start()], True
    text = re.sub(
        r"^(-?) ?(?:\\text ?\{ ?)?(?:€|£|¥|USD|US|Rs\.?|EUR)+(?: ?\})? ?|(?<=\d) ?[€£¥]$|€", r"\1", text
    )
    scale = 1
    if m := re.search(
        rf"(?<=\d) ?(?:\\text ?\{{ ?)?({'|'.join(_SCALES)})(?![a-z])( [^{{}}]*)?\}}?(?: ?\\text ?\{{[^{{}}]*\}})?$",
        text,
    ):
        text, scale = text[: m.start()], _SCALES[m[1]]
    if not _TRIGONOMETRY.search(text):
        text = _DEGREE_SCALE.sub("", text)
    text = re.sub(r"(?<=[\d}]) ?(?:\^ ?\{? ?(?:\\prime ?)+\}?|'+)$", "", text)
    if scale == 1 and re.search(r"[\d)}\]]|\\pi", text):
        text = re.sub(r"\\text ?\{[^{}]*$", "", text)
        text = _TEXT_UNIT.sub("", text).strip()
        text = _PLAIN_UNIT.sub("", text).strip()
        text = re.sub(r"^\\text ?\{[^{}]*\} ?(?=[-+\d.\\(])", "", text)
        if bare_units:
            text = _SINGLE_LETTER_UNIT.sub("", text)
    text = join_thousands(text.strip().strip("=").strip())
    if plain := plain_number(text):
        percent = percent or plain.percent
        plain = Plain(plain.value * scale, plain.decimal, percent)
        return Scalar(
            sympy.Rational(plain.value.numerator, plain.value.denominator),
            plain,
            plain.decimal,
            percent,
        )
    if (
        not re.search(r"[\d\\^_+=/|!-]", text)
        and (value := _number_word(re.sub(r"[{}]", "", text))) is not None
    ):
        return Scalar(sympy.Integer(value), Plain(Fraction(value)))
    if (
        re.fullmatch(r"[A-Z]{2,}|[A-Za-z]*[aeiou][A-Za-z]*", text)
        and len(text) > 2
        and not set(text) <= set("abcxyzpqrkmn")
    ):
        return Text(words(text))
    try:
        return Scalar(formula(text) * scale, None, bool(re.search(r"\.\d", text)), percent)
    except NotMathematics:
        if re.search(r"[\\^_=<>]|\d", re.sub(r"\\text(?![a-zA-Z])", "", source)) and not re.fullmatch(
            r"[\w\s,.'&():-]+", re.sub(r"\\text(?![a-zA-Z])|[{}]", "", source)
        ):
            raise
        return Text(words(source))


_RELATIONS = {
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    r"\lt": "<",
    r"\gt": ">",
    "=": "=",
}
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|measuredangle|vec|hat)(?![a-zA-Z]) ?)?"
    r"(?:\{?(?:\\[a-zA-Z]+|[A-Za-z](?: ?[A-Za-z]){0,3})\}?|\\text ?\{[^{}]*\})"
    r"(?: ?_ ?(?:\{[^{}]*\}|\\?\w)| ?'|\^ ?\{?(?: ?\\prime)+\}?|[A-Z](?: ?_ ?(?:\{[^{}]*\}|\w))?)*"
    r"(?: ?\((?:[^()]|\([^()]*\))*\))?"
)


def is_name(text: str) -> bool:
    r"""Whether one side of an equation only names the other: ``x``, ``f(x)``, ``m_{\max}``, ``\angle ABC``."""
    text = text.strip()
    return bool(_NAME.fullmatch(text)) and not re.match(
        r"\\(?:frac|sqrt|sin|cos|tan|log|ln|pi|infty|binom)(?![a-z])", text
    )


def _and_or(text: str) -> tuple[str, str]:
    """Separators in words as commas, and which word it was."""
    said = re.findall(r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])", text)
    text = re.sub(r"\\text ?\{[ ,]*(?:and|or)[ ,]*\}", ",", text)
    text = _top_level(text, lambda part: re.sub(r",? (?:and|or)(?= )", ",", part))
    return re.sub(r",[ ,]*,", ",", text), said[-1] if said else ""


@lru_cache(maxsize=4096)
def read(text: str, bare_units: bool = False):
    """Read a tidy text.

    Parameters
    ----------
    text : str
        From `tidy`.
    bare_units : bool
        Take a single letter behind a number for its unit (``18 m``), not for a variable.

    Raises
    ------
    NotMathematics
        Nothing reads it.
    """
    text = text.strip()
    if not text or len(text) > LONGEST:
        raise NotMathematics(text[:100])
    text = re.sub(r"\\mathrm(?![a-zA-Z])", r"\\text", text)
    if m := re.fullmatch(r"\\text ?\{([^{}]*)\}", text):
        return read(tidy(m[1]), bare_units) if tidy(m[1]) else Text("")
    if (m := _bracketed(text)) and m[0] == "{" and m[2] == "}":
        return read(tidy(m[1]), bare_units) if tidy(m[1]) else Text("")
    if (special := _when(text) or _base(text)) is not None:
        return special
    if re.fullmatch(r"\\(?:mathbb|Bbb) ?\{?R\}?|\\reals?|all reals?(?: numbers?)?", text):
        return Items((Scalar(-sympy.oo), Scalar(sympy.oo)), "(", ")")
    if text in (r"\emptyset", r"\varnothing"):
        return Items((), r"\{", r"\}")
    text, conjunction = _and_or(text)
    text = _top_level(text, join_thousands)
    pieces, found = split(text, {",", ";"})
    if found:
        pieces = [re.sub(r"^(?:\\text ?\{ ?)?(?:and|or)(?![a-z]) ?\}?", "", p).strip() for p in pieces]
        pieces = [p for p in pieces if p]
        if len(pieces) == 1:
            return read(pieces[0], bare_units)
        items = []
        for piece in pieces:
            item = read(piece, bare_units)
            items += item.items if isinstance(item, Items) and not item.opening else [item]
        return Items(tuple(items), conjunction=conjunction)
    pieces, found = split(text, {r"\approx"})
    if found:
        return (
            read(next(p for p in pieces if p), bare_units)
            if not is_name(pieces[0])
            else read(pieces[1], bare_units)
        )
    pieces, found = split(text, {r"\cup", r"\setminus", r"\backslash"})
    if found:
        kept = tuple(
            read(p, bare_units) for p, op in zip(pieces, [r"\cup", *found], strict=True) if op == r"\cup"
        )
        removed = tuple(
            read(p, bare_units) for p, op in zip(pieces, [r"\cup", *found], strict=True) if op != r"\cup"
        )
        return Union(kept, removed)
    pieces, found = split(text, {r"\in"})
    if found:
        return read(pieces[-1], bare_units)
    pieces, found = split(text, set(_RELATIONS))
    if found and not (len(pieces) == 2 and not all(pieces)):
        sides = []
        for piece in pieces:
            try:
                sides.append(read(piece, bare_units))
            except NotMathematics:
                if not is_name(piece):
                    raise
                sides.append(Text(words(piece)))
        return Relation(tuple(sides), tuple(_RELATIONS[op] for op in found), tuple(pieces))
    if m := re.fullmatch(
        r"\\begin ?\{([a-z]*matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end ?\{\1\}", text, re.DOTALL
    ):
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", m[2]) if row.strip()]
        return Matrix(
            tuple(tuple(read(tidy(cell), bare_units) for cell in split(row, {"&"})[0]) for row in rows)
        )
    if m := _bracketed(text):
        opening, inside, closing = m
        if opening == r"\{":
            item = read(inside, bare_units) if inside else Items(())
            return Items(
                item.items if isinstance(item, Items) and not item.opening else (item,), opening, r"\}"
            )
        pieces, found = split(inside, {",", ";"})
        if found:
            return Items(tuple(read(p, bare_units) for p in pieces if p), opening, closing)
        if {opening, closing} in ({"(", ")"}, {"[", "]"}):
            return read(inside, bare_units)
    if r"\pm" in text or r"\mp" in text:
        plus = re.sub(r"^\+ ?", "", re.sub(r"\\pm ?", "+", re.sub(r"\\mp ?", "-", text)))
        minus = re.sub(r"^\+ ?", "", re.sub(r"\\pm ?", "-", re.sub(r"\\mp ?", "+", text)))
        return Items((read(plus, bare_units), read(minus, bare_units)))
    pieces, found = split(text, {":"})
    if found and all(pieces):
        return Parts("ratio", tuple(_atom(piece, bare_units) for piece in pieces))
    return _atom(text, bare_units)
