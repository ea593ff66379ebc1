"""When two answers are the same, under the answer policy. Runs in a worker process only."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import pairwise

import sympy

from .formulas import MP, Undefined, close, exact, numeric, plain_functions, same_formula
from .reading import (
    Items,
    Matrix,
    NotMathematics,
    Parts,
    Relation,
    Scalar,
    Text,
    Union,
    choice,
    formula,
    is_name,
    read,
)
from .spelling import DECIMAL_TOLERANCE, compact, same_plain, tidy, words


def _ends(expr: sympy.Basic) -> bool:
    """Whether the decimal expansion of a constant ends (within 15 digits)."""
    value = exact(expr)
    if value is None:
        try:
            value = numeric(expr, {})
        except (Undefined, KeyError):
            return False
        scaled = value * 10**15
        return MP.im(value) == 0 and abs(scaled - MP.nint(scaled)) < MP.mpf(10) ** -20
    return (value * 10**15).denominator == 1


def same_scalar(gold: Scalar, answer: Scalar, tolerance: Fraction | None = None) -> bool:
    if gold.plain and answer.plain:
        return same_plain(gold.plain, answer.plain, tolerance)
    pairs = [(gold.expr, answer.expr)]
    if gold.percent and not answer.percent:
        pairs.append((gold.expr / 100, answer.expr))
    if answer.percent and not gold.percent:
        pairs.append((gold.expr, answer.expr / 100))
    for one, other in pairs:
        if same_formula(one, other):
            return True
        constant = not (one.free_symbols or other.free_symbols)
        if constant and tolerance is not None:
            try:
                if (
                    abs(numeric(one, {}) - numeric(other, {}))
                    <= MP.mpf(tolerance.numerator) / tolerance.denominator
                ):
                    return True
            except (Undefined, KeyError):
                pass
        if gold.decimal != answer.decimal or (
            (gold.plain or answer.plain) and (gold.decimal or answer.decimal)
        ):
            exact_side = other if (gold.decimal and gold.plain) or not answer.decimal else one
            if (not constant or not _ends(exact_side)) and same_formula(one, other, decimals=True):
                return True
    return False


def _same_parts(gold: Parts, answer, tolerance) -> bool:
    if gold.kind == "ratio" and isinstance(answer, Scalar) and len(gold.parts) == 2:
        if all(isinstance(part, Scalar) for part in gold.parts) and gold.parts[1].expr != 0:
            return same_formula(gold.parts[0].expr / gold.parts[1].expr, answer.expr)
        return False
    if not isinstance(answer, Parts) or len(gold.parts) != len(answer.parts):
        return _clock_as_ratio(gold, answer) if isinstance(answer, (Parts, Scalar)) else False
    if gold.kind == answer.kind == "ratio":
        if not all(isinstance(part, Scalar) for part in (*gold.parts, *answer.parts)):
            return all(same(g, a) for g, a in zip(gold.parts, answer.parts, strict=True))
        return all(
            same_formula(g1.expr * a2.expr, g2.expr * a1.expr)
            for (g1, g2), (a1, a2) in zip(pairwise(gold.parts), pairwise(answer.parts), strict=True)
        ) and all(
            same_formula(sympy.Integer(0), g.expr) == same_formula(sympy.Integer(0), a.expr)
            for g, a in zip(gold.parts, answer.parts, strict=True)
        )
    if gold.kind == answer.kind == "clock":
        return gold.parts == answer.parts and ("" in (gold.note, answer.note) or gold.note == answer.note)
    if gold.kind == answer.kind == "date":
        if gold.note == answer.note:
            return all(None in (g, a) or g == a for g, a in zip(gold.parts, answer.parts, strict=True))
        return False
    if gold.kind == answer.kind:
        return gold.parts == answer.parts
    return _clock_as_ratio(gold, answer)


def _clock_as_ratio(gold: Parts, answer) -> bool:
    """9:24 may be a ratio: against 3:8 or 3/8 it is read as one."""

    def ratio(value):
        if (
            isinstance(value, Parts)
            and value.kind == "clock"
            and not value.note
            and len(value.parts) == 2
            and value.parts[1]
        ):
            return Fraction(*value.parts)
        if isinstance(value, Parts) and value.kind == "ratio" and len(value.parts) == 2:
            pair = [exact(p.expr) if isinstance(p, Scalar) else None for p in value.parts]
            return pair[0] / pair[1] if None not in pair and pair[1] else None
        return value.plain.value if isinstance(value, Scalar) and value.plain else None

    one, other = ratio(gold), ratio(answer)
    return "base" not in (gold.kind, getattr(answer, "kind", "")) and one is not None and one == other


def _in_any_order(gold, answer, tolerance) -> bool:
    """Whether each value of one list has its own equal in the other."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for value in gold:
        match = next((i for i, other in enumerate(left) if same(value, other, tolerance)), None)
        if match is None:
            return False
        del left[match]
    return True


def _distinct(items):
    kept = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _same_items(gold: Items, answer: Items, tolerance) -> bool:
    sets = {r"\{"}
    if gold.opening in sets and answer.opening in sets:
        return _in_any_order(_distinct(gold.items), _distinct(answer.items), tolerance)
    gold_ordered, answer_ordered = (x.opening not in ("", r"\{") for x in (gold, answer))
    if not gold_ordered and not answer_ordered:
        return _in_any_order(gold.items, answer.items, tolerance)
    if r"\{" in (gold.opening, answer.opening) or len(gold.items) != len(answer.items):
        return False
    if (
        gold_ordered
        and answer_ordered
        and len(gold.items) == 2
        and (gold.opening, gold.closing) != (answer.opening, answer.closing)
    ):
        return False
    return all(same(g, a, tolerance) for g, a in zip(gold.items, answer.items, strict=True))


def region(value, variable: str | None = None) -> sympy.Set:
    """The set of real numbers that an interval, union, finite set or inequality in one variable describes.

    Raises
    ------
    NotMathematics
        It describes none.
    """
    if isinstance(value, Scalar):
        return sympy.FiniteSet(sympy.nsimplify(value.expr) if value.plain else value.expr.doit())
    if isinstance(value, Items) and value.opening == r"\{":
        return sympy.Union(*(region(item) for item in value.items))
    if isinstance(value, Items) and value.opening and len(value.items) == 2:
        ends = [item.expr.doit() for item in value.items if isinstance(item, Scalar)]
        if len(ends) == 2 and all(end.is_extended_real for end in ends):
            return sympy.Interval(*ends, left_open=value.opening == "(", right_open=value.closing == ")")
    if isinstance(value, Items) and not value.opening and value.items:
        regions = [region(item) for item in value.items]
        union = sympy.Union(*regions)
        return (
            union if value.conjunction != "and" and union != sympy.S.Reals else sympy.Intersection(*regions)
        )
    if isinstance(value, Union):
        kept = sympy.Union(*(region(part) for part in value.parts))
        return (
            sympy.Complement(kept, sympy.Union(*(region(part) for part in value.without)))
            if value.without
            else kept
        )
    if isinstance(value, Scalar | Text):
        raise NotMathematics(str(value))
    if isinstance(value, Relation) and all(op != "=" for op in value.ops):
        result = sympy.S.Reals
        for left, op, right in zip(value.sides, value.ops, value.sides[1:], strict=False):
            result = sympy.Intersection(result, _half(left, op, right))
        return result
    raise NotMathematics(str(value))


def _half(left, op: str, right) -> sympy.Set:
    """Where ``left op right`` holds, for one unknown, which may be written as a function."""
    if not isinstance(left, Scalar) or not isinstance(right, Scalar):
        raise NotMathematics("a relation between other things than numbers")
    expr = plain_functions(left.expr - right.expr)
    if len(expr.free_symbols) != 1:
        raise NotMathematics("a relation in several unknowns")
    (unknown,) = expr.free_symbols
    real = sympy.Symbol("x", real=True)
    relation = sympy.Rel(expr.xreplace({unknown: real}).doit(), 0, {"!=": "ne"}.get(op, op))
    if relation in (sympy.true, sympy.false):
        return sympy.S.Reals if relation == sympy.true else sympy.S.EmptySet
    return relation.as_set()


def _unknowns(value: Relation) -> set:
    return set().union(*(plain_functions(s.expr).free_symbols for s in value.sides if isinstance(s, Scalar)))


def _difference(value: Relation) -> sympy.Basic:
    """Left minus right of a relation with two sides."""
    sides = []
    for side, text in zip(value.sides, value.texts, strict=True):
        sides.append(side.expr if isinstance(side, Scalar) else formula(text))
    return plain_functions(sides[0] - sides[-1])


def _same_equation(gold: Relation, answer: Relation) -> bool:
    """Whether two equations have the same solutions: equal up to a factor, or after clearing fractions and powers."""
    one, other = _difference(gold), _difference(answer)
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    if _constant_ratio(one, other) is not None:
        return True
    reduced = []
    for expr in (one, other):
        numerator, _ = sympy.fraction(sympy.together(expr.doit()))
        try:
            reduced.append(sympy.Poly(numerator, *sorted(expr.free_symbols, key=str)).sqf_part().as_expr())
        except sympy.PolynomialError:
            return False
    return _constant_ratio(*reduced) is not None


def _constant_ratio(one: sympy.Basic, other: sympy.Basic):
    """The factor between two formulas if it is a constant, measured at random points; else None."""
    names, generator, ratios = (
        sorted({s.name for s in one.free_symbols | other.free_symbols}),
        random.Random(1),
        [],
    )
    for trial in range(12):
        at = {name: MP.mpf((1, 3, 20)[trial % 3]) * generator.randint(1, 9973) / 9974 for name in names}
        try:
            left, right = numeric(one, at), numeric(other, at)
            if left == 0 or right == 0:
                continue
            ratios.append(left / right)
        except Undefined:
            continue
        if not close(ratios[0], ratios[-1]):
            return None
        if len(ratios) == 5:
            break
    return ratios[0] if len(ratios) >= 3 else None


_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


def _same_inequality(gold: Relation, answer: Relation) -> bool:
    if len(gold.ops) == len(answer.ops) == 1:
        try:
            ratio = _constant_ratio(_difference(gold), _difference(answer))
        except NotMathematics:
            ratio = None
        if ratio is not None and MP.im(ratio) == 0:
            return answer.ops[0] == (gold.ops[0] if ratio > 0 else _FLIPPED[gold.ops[0]])
    if _unknowns(gold) != _unknowns(answer):
        return False
    return region(gold) == region(answer)


def _is_equation(value) -> bool:
    return isinstance(value, Relation) and all(op == "=" for op in value.ops)


def _function_name(text: str) -> tuple[str, str] | None:
    m = re.fullmatch(r"([A-Za-z]) ?\( ?([a-z]) ?\)", text.strip())
    return (m[1], m[2]) if m else None


def _same_relation(gold: Relation, answer: Relation, tolerance) -> bool:
    if not (_is_equation(gold) and _is_equation(answer)):
        return not _is_equation(gold) and not _is_equation(answer) and _same_inequality(gold, answer)
    names = [is_name(relation.texts[0]) for relation in (gold, answer)]
    if all(names):
        if compact(gold.texts[0]) == compact(answer.texts[0]):
            return same(gold.sides[-1], answer.sides[-1], tolerance)
        one, other = _function_name(gold.texts[0]), _function_name(answer.texts[0])
        if one and other and all(isinstance(r.sides[-1], Scalar) for r in (gold, answer)):
            renamed = answer.sides[-1].expr.xreplace({sympy.Symbol(other[1]): sympy.Symbol(one[1])})
            return one[0] == other[0] and same_formula(gold.sides[-1].expr, renamed)
    if not _unknowns(gold) and not _unknowns(answer):  # 0.56 = 56 %
        return same(gold.sides[-1], answer.sides[-1], tolerance)
    return _same_equation(gold, answer)


def same(gold, answer, tolerance: Fraction | None = None) -> bool:
    """Whether an answer is the gold. Not symmetric: a gold relation accepts the interval that solves it only."""
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return same_scalar(gold, answer, tolerance)
    if isinstance(gold, Text) and isinstance(answer, Text):
        return gold.key == answer.key
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relation(gold, answer, tolerance)
    if _is_equation(answer) and not isinstance(gold, Relation):
        # k = 14 for 14, 2 + 3 = 5 for 5, and 5 = k
        value = (
            answer.sides[0]
            if is_name(answer.texts[-1]) and not is_name(answer.texts[0])
            else answer.sides[-1]
        )
        return same(gold, value, tolerance)
    if _is_equation(gold):
        # The other way round only where the left side is a name: y = 2x for 2x, not 5x + 3y = 0 for 0.
        constant = isinstance(gold.sides[0], Scalar) and not gold.sides[0].expr.free_symbols
        return (is_name(gold.texts[0]) or constant) and same(gold.sides[-1], answer, tolerance)
    if isinstance(gold, Relation):
        return isinstance(answer, (Items, Union)) and region(gold) == region(answer)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _same_items(gold, answer, tolerance) or _relations_as_region(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer, tolerance)
    if isinstance(gold, Union) or isinstance(answer, Union):
        return _same_union(gold, answer, tolerance)
    if isinstance(gold, Parts):
        return _same_parts(gold, answer, tolerance)
    if isinstance(answer, Parts):
        return (
            isinstance(gold, Scalar)
            and answer.kind in ("ratio", "clock")
            and _same_parts(answer, gold, tolerance)
        )
    if isinstance(gold, Items) and len(gold.items) == 1:
        return same(gold.items[0], answer, tolerance)
    if isinstance(answer, Items) and len(answer.items) == 1:
        return same(gold, answer.items[0], tolerance)
    return False


def _relations_as_region(gold: Items, answer: Items) -> bool:
    """``x < 1 or x > 3`` accepts what it describes."""
    if gold.items and all(isinstance(item, Relation) and not _is_equation(item) for item in gold.items):
        return len({frozenset(_unknowns(item)) for item in gold.items}) == 1 and region(gold) == region(
            answer
        )
    return False


def _same_union(gold, answer, tolerance) -> bool:
    if (
        isinstance(gold, Union)
        and isinstance(answer, Union)
        and _in_any_order(gold.parts, answer.parts, tolerance)
        and _in_any_order(gold.without, answer.without, tolerance)
    ):
        return True
    if any(
        isinstance(value, Relation)
        for value in (answer, *getattr(answer, "items", ()), *getattr(answer, "parts", ()))
    ):
        return False
    if not isinstance(gold, (Union, Items)) or not isinstance(answer, (Union, Items)):
        return False
    return region(gold) == region(answer)


def _same_matrix(gold, answer, tolerance) -> bool:
    def line(value):  # a vector, whichever way it is written
        if isinstance(value, Matrix):
            if len(value.rows) == 1:
                return value.rows[0]
            return tuple(row[0] for row in value.rows) if all(len(row) == 1 for row in value.rows) else None
        return value.items if isinstance(value, Items) and value.opening in ("(", "[") else None

    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        cells = [
            (g, a)
            for one, other in zip(gold.rows, answer.rows, strict=True)
            for g, a in zip(one, other, strict=True)
        ]
    else:
        one, other = line(gold), line(answer)
        if one is None or other is None or len(one) != len(other):
            return False
        cells = list(zip(one, other, strict=True))
    return all(same(g, a, tolerance) for g, a in cells)


def _symbols_of(value) -> bool:
    """Whether a value contains free variables (then a single letter is one, and no unit)."""
    if isinstance(value, Scalar):
        return bool(value.expr.free_symbols)
    if isinstance(value, Relation):
        return any(
            _symbols_of(side)
            for side, text in zip(value.sides, value.texts, strict=True)
            if not is_name(text)
        )
    return any(
        _symbols_of(item)
        for item in getattr(value, "items", ()) or getattr(value, "parts", ())
        if not isinstance(item, int)
    )


def _wordy(gold: str) -> bool:
    flat = re.sub(r"\\text(?![a-zA-Z])|[{}$]", "", gold)
    return len(re.findall(r"(?<!\\)\b[A-Za-z]{3,}", flat)) > 3 and bool(re.search(r"[=\\^]", flat))


def judge(
    answer: str, joined: str | None, gold: str, tolerance: Fraction | None = None
) -> tuple[bool | None, str]:
    """Compare an extracted answer with a gold.

    Returns
    -------
    tuple of (bool or None, str)
        The verdict (None: the gold cannot be read) and its reason.
    """
    answer, gold = tidy(answer), tidy(gold)
    letter, rest = choice(gold)
    if letter is not None:
        given, text = choice(answer)
        marked = rest or letter.isupper()
        if given is not None and (given == letter or (marked and given.upper() == letter)):
            return True, "same choice letter"
        if rest:
            gold = rest
        if given is not None and text and rest:
            answer = text
    others = [joined] if joined else []
    if letter is None and (text := choice(answer)[1]):  # (C) 12 where the gold is 12
        others.append(text)
    try:
        if _wordy(gold):
            raise NotMathematics(gold)
        target = read(gold)
    except NotMathematics:
        if words(gold) == words(answer):
            return True, "same text"
        return None, "gold unreadable: neither mathematics nor a plain text"
    attempts = [answer] + [other for other in others if other is not joined or isinstance(target, Items)]
    # A gold that gives its rounded value, too, is right either way.
    golds = (
        [read(piece) for piece in gold.split(r"\approx") if piece.strip()] if r"\approx" in gold else [target]
    )
    understood = False
    for attempt in attempts:
        for bare_units in (False,) if _symbols_of(target) else (False, True):
            try:
                value = read(tidy(attempt), bare_units)
                understood = True
            except NotMathematics:
                continue
            for reference in golds:
                try:
                    if same(reference, value, tolerance):
                        return True, _reason(reference, value)
                except (
                    NotMathematics,
                    Undefined,
                    NotImplementedError,
                    TypeError,
                    ValueError,
                    AttributeError,
                    KeyError,
                ):
                    continue
    if words(gold) == words(answer) if isinstance(target, Text) else compact(gold) == compact(answer):
        return True, "same text"
    return False, "different values" if understood else "answer is neither mathematics nor the gold's text"


def _reason(gold, answer) -> str:
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        if gold.decimal != answer.decimal and (gold.expr != answer.expr):
            return f"equal within {float(DECIMAL_TOLERANCE):.0e} (decimal)"
        return "same number" if not gold.expr.free_symbols else "same formula"
    kinds = {
        Text: "text",
        Items: "values",
        Union: "set",
        Matrix: "matrix",
        Relation: "relation",
        Parts: "value",
    }
    return f"same {kinds.get(type(gold), 'value')}"
