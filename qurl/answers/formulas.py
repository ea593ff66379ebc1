"""Formulas as values: exact where they are rational, else to 60 digits. Runs in a worker process only."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import mpmath
import sympy
from math_verify import verify
from sympy.core.function import AppliedUndef

MP = mpmath.mp.clone()
MP.dps = 60
_LARGEST = 10**3000  # numbers beyond are equal only where they are written alike
_EXACT_BITS = 200_000


class Undefined(ArithmeticError):
    """A formula has no value at a point."""


def exact(expr: sympy.Basic) -> Fraction | None:
    """The value of an integer or rational formula, without ever computing a number of more than 200,000 bits."""
    if isinstance(expr, sympy.Rational):
        return Fraction(int(expr.p), int(expr.q)) if expr.q else None
    if not isinstance(
        expr, (sympy.Add, sympy.Mul, sympy.Pow, sympy.factorial, sympy.binomial, sympy.UnevaluatedExpr)
    ):
        return None
    args = [exact(arg) for arg in expr.args]
    if any(arg is None for arg in args):
        return None
    if isinstance(expr, sympy.Add):
        return sum(args, Fraction(0))
    if isinstance(expr, sympy.Mul):
        value = Fraction(1)
        for arg in args:
            value *= arg
            if value.numerator.bit_length() > _EXACT_BITS:
                return None
        return value
    if isinstance(expr, sympy.Pow):
        base, power = args
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if power.denominator != 1 or bits * abs(power) > _EXACT_BITS or (base == 0 and power <= 0):
            return None
        return base ** int(power)
    if any(arg.denominator != 1 or not 0 <= arg <= 5000 for arg in args):
        return None
    return Fraction(int(expr.func(*(sympy.Integer(int(arg)) for arg in args))))


_FUNCTIONS = {
    "sin": MP.sin, "cos": MP.cos, "tan": MP.tan, "cot": MP.cot, "sec": MP.sec, "csc": MP.csc,
    "asin": MP.asin, "acos": MP.acos, "atan": MP.atan, "acot": MP.acot, "sinh": MP.sinh, "cosh": MP.cosh,
    "tanh": MP.tanh, "exp": MP.exp, "Abs": abs, "factorial": MP.factorial, "binomial": MP.binomial,
    "re": MP.re, "im": MP.im, "conjugate": MP.conj, "Max": max, "Min": min,
    "UnevaluatedExpr": lambda x: x, "gamma": MP.gamma, "sign": MP.sign,
}  # fmt: skip


def numeric(expr: sympy.Basic, at: dict):
    """The value of a formula at a point, to 60 digits.

    Raises
    ------
    Undefined
        There is none.
    """
    if isinstance(expr, sympy.Symbol):
        return at[expr.name]
    if isinstance(expr, sympy.Rational):
        return MP.mpf(int(expr.p)) / int(expr.q)
    if isinstance(expr, sympy.Float):
        return MP.mpf(expr)
    if expr.is_Atom:
        if expr in (sympy.pi, sympy.E, sympy.I, sympy.GoldenRatio):
            return {sympy.pi: MP.pi, sympy.E: MP.e, sympy.I: MP.j, sympy.GoldenRatio: MP.phi}[expr] * 1
        raise Undefined(str(expr))
    args = [numeric(arg, at) for arg in expr.args]
    name = type(expr).__name__
    try:
        if isinstance(expr, sympy.Add):
            return MP.fsum(args)
        if isinstance(expr, sympy.Mul):
            return MP.fprod(args)
        if isinstance(expr, sympy.Pow):
            return _power(args[0], args[1], expr.args[1])
        if name == "log":
            return MP.log(args[0]) / (MP.log(args[1]) if len(args) > 1 else 1)
        if name in ("floor", "ceiling"):
            # What is a whole number up to rounding is that number.
            near = MP.nint(args[0])
            close = abs(args[0] - near) < MP.mpf(10) ** -40 * max(1, abs(near))
            return near if close else (MP.floor if name == "floor" else MP.ceil)(args[0])
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*args)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:
        raise Undefined(str(error)) from error
    raise Undefined(name)


def _power(base, power, written):
    if base == 0 and MP.re(power) <= 0:
        raise Undefined("0 to a power that is not positive")
    ratio = exact(written)
    if (
        ratio is not None
        and ratio.denominator % 2 == 1
        and ratio.denominator > 1
        and MP.im(base) == 0
        and base < 0
    ):
        root = -((-base) ** power)  # the real odd root
        return root if ratio.numerator % 2 else -root
    return base**power


def close(one, other, tolerance=None) -> bool:
    difference, size = abs(one - other), min(abs(one), abs(other))
    if not MP.isfinite(difference):
        raise Undefined("not finite")
    if tolerance is not None:
        return difference <= tolerance * max(abs(one), abs(other))
    return difference <= MP.mpf(10) ** -35 * min(size, 1) or max(abs(one), abs(other)) < MP.mpf(10) ** -45


def plain_functions(expr: sympy.Basic) -> sympy.Basic:
    """Unknown functions, derivatives and the like as symbols named by their spelling."""
    return expr.replace(
        lambda e: isinstance(e, (AppliedUndef, sympy.Derivative)),
        lambda e: sympy.Symbol(re.sub(r"\s", "", str(e))),
    )


_WHOLE = (sympy.floor, sympy.ceiling, sympy.factorial, sympy.binomial, sympy.Mod)


def same_formula(gold: sympy.Basic, answer: sympy.Basic, decimals: bool = False) -> bool:
    """Whether two formulas agree: exactly where both are rational, else at random positive points to 35 digits."""
    if gold == answer:
        return True
    infinite = [expr for expr in (gold, answer) if expr.has(sympy.oo, sympy.zoo, sympy.nan)]
    if infinite:
        return False if len(infinite) == 1 else sympy.simplify(gold) == sympy.simplify(answer)
    one, other = exact(gold), exact(answer)
    if one is not None and other is not None:
        return one == other
    gold, answer = plain_functions(gold), plain_functions(answer)
    if gold.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit) or answer.has(
        sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit
    ):
        gold, answer = gold.doit(), answer.doit()
    names = sorted({s.name for s in gold.free_symbols | answer.free_symbols})
    whole = gold.has(*_WHOLE) or answer.has(*_WHOLE)
    generator = random.Random(0)
    agreed = 0
    for trial in range(12 if names else 1):
        if whole:  # floors, factorials and binomials: at whole numbers, even and odd
            at = {
                name: MP.mpf(2 + (trial if i == 0 else generator.randint(0, 10)))
                for i, name in enumerate(names)
            }
        else:
            scale = MP.mpf((1, 3, 20, 2)[trial % 4])
            at = {name: scale * generator.randint(1, 9973) / 9974 for name in names}
        try:
            left, right = numeric(gold, at), numeric(answer, at)
            if max(abs(left), abs(right)) > _LARGEST:
                return False
            if max(abs(left), abs(right)) > 10**20 and not names:
                with MP.workdps(60 + int(MP.log10(max(abs(left), abs(right))))):
                    left, right = numeric(gold, at), numeric(answer, at)
            if not close(left, right, MP.mpf(1) / 10_000 if decimals else None):
                return False
        except Undefined:
            continue
        agreed += 1
        if agreed == (10 if whole else 5):
            break
    if agreed:
        return agreed >= (3 if names else 1)
    return bool(verify(gold, answer, float_rounding=12, timeout_seconds=None))
