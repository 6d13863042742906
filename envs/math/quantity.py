r"""Read a number as people write it down, with its unit: what math-verify lacks.

math-verify compares expressions. It does not compare units (12 hours is 12 minutes to it), it has
no thousands, and it does the work that an answer leaves (`2+3` is 5 to it). So an answer that is
one number is read here: a decimal, a fraction, a mixed number, a power, a root, a multiple of pi,
and products of these, never a sum, a list or a choice. What comes out is LaTeX that math-verify
reads, the exact value where it is rational, and the unit. Pure; the time is linear in the text.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

_MOST_DIGITS = 400
"""Of a power's value: a larger one is left to math-verify."""
_MOST_CHARS = 1000
"""Of one decimal."""
_MAX_DEPTH = 20

_UNITS = {
    "metre": "m meter metre",
    "millimetre": "mm millimeter millimetre",
    "centimetre": "cm centimeter centimetre",
    "decimetre": "dm decimeter decimetre",
    "kilometre": "km kilometer kilometre",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "gram": "g gram",
    "milligram": "mg milligram",
    "kilogram": "kg kgs kilogram kilo",
    "ton": "t ton tonne",
    "pound": "lb lbs pound",
    "ounce": "oz ounce",
    "litre": "l L liter litre",
    "millilitre": "ml mL milliliter millilitre",
    "gallon": "gal gallon",
    "quart": "qt quart",
    "pint": "pint",
    "cup": "cup",
    "second": "s sec secs second",
    "millisecond": "ms millisecond",
    "minute": "min mins minute",
    "hour": "h hr hrs hour",
    "day": "day",
    "week": "wk week",
    "month": "month",
    "year": "yr yrs year",
    "newton": "N newton",
    "joule": "J joule",
    "kilojoule": "kJ kilojoule",
    "watt": "W watt",
    "kilowatt": "kW kilowatt",
    "volt": "V volt",
    "ampere": "ampere amp",
    "ohm": "ohm",
    "hertz": "Hz hertz",
    "pascal": "Pa pascal",
    "mole": "mol mole",
    "kelvin": "K kelvin",
    "celsius": "C celsius centigrade",
    "fahrenheit": "F fahrenheit",
    "degree": "deg degree",
    "radian": "rad radian",
    "percent": "percent pct percentage",
    "dollar": "dollar USD usd buck",
    "cent": "cent penny pennies ¢",
    "euro": "euro EUR eur",
    "british pound": "£ GBP gbp pence",
    "yen": "yen JPY jpy",
    "rupee": "rupee INR inr",
    "byte": "byte",
    "bit": "bit",
}
_KNOWN = {alias: unit for unit, aliases in _UNITS.items() for alias in aliases.split()}
_COMPOUND = {
    "mph": {"mile": 1, "hour": -1},
    "kph": {"kilometre": 1, "hour": -1},
    "kmh": {"kilometre": 1, "hour": -1},
    "fps": {"foot": 1, "second": -1},
    "cc": {"centimetre": 3},
}
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_WORDS = {
    "filling": "a an the of in unit units each total altogether only about approximately exactly "
    "whole st nd rd th",
    "more than a unit": "or and not to but is are than least most between plus minus over times "
    "either neither nor if when where maybe perhaps any all none no must does cannot x y z i e n",
}
_FILLERS = frozenset(_WORDS["filling"].split())
_NO_UNIT = frozenset(_WORDS["more than a unit"].split())
"""Words behind a number that make it another statement."""
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "british pound", "¥": "yen", "₹": "rupee"}

_CHARACTERS = {
    **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div "},
    **{"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\leq ", "≥": r"\geq "},
    **{"≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∅": r"\emptyset "},
    **{"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    **{"\u00a0": " ", "\u202f": " ", "\u2009": " ", "θ": r"\theta "},
}
_SPACES = re.compile(
    r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace|enspace|hspace\{[^{}]*\})(?![A-Za-z])"
)
_NO_MEANING = re.compile(
    r"(?<!\\)\\!|\\(?:displaystyle|textstyle|scriptstyle|limits|large|Large|LARGE|huge|Huge|small|bf|rm|it"
    r"|bigg?[lr]?|Bigg?[lr]?)(?![A-Za-z])|\\(?:left|right)(?=\s*(?:[()\[\]|.]|\\[{}|]))|\{\}"
)
_PLAIN_TEXT = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])sqrt(?![A-Za-z])|√", r"\\sqrt "),
        (r"(?<![A-Za-z\\])(?:infinity|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<=\d)\s*x\s*(?=10\^)", r"\\times "),
        (r"(?<=[\d)])\*\*(?=[-\d(])", "^"),
        (r"\^\s*(?:o|\{o\})(?![A-Za-z])", r"^\\circ "),
        (r"(?<=\d)\s*\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?(st|nd|rd|th)\}{0,2}", r" \1 "),
    )
)
"""What is written without LaTeX, or beside it."""
_EMPTY_SETS = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}")
_TEXT = (
    r"\\(?:text|mathrm|mbox|textbf|mathbf|textrm|textit|mathit|textsf|mathsf|operatorname|rm|bm)"
)
_WRAPPER = re.compile(rf"(?:(?:{_TEXT}|\\f?box(?:ed)?|\\underline)\s*)?\{{")
_DELIMITERS = (
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("$$", "$$"),
    ("$", "$"),
    ("**", "**"),
    ("`", "`"),
    ("(", ")"),
)
_LABEL = re.compile(
    r"(?:(?:so|thus|therefore|hence)?,?\s*(?:the|my|our)?\s*(?:final|correct)?\s*answer\s*"
    r"(?:is|=|:)+)\s*",
    re.IGNORECASE,
)
_INDICES = re.compile(r"_(?:\{[^{}=]*\}|\w)|\([^()=]*\)")

_DECIMAL = re.compile(
    r"(?:(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?P<part>\.\d*)?|(?P<only>\.\d+))"
    r"(?![\d])(?:[eE](?P<exponent>[+-]?\d{1,3})(?!\d))?"
)
_RECURRING = re.compile(
    r"(?P<whole>\d*)\.(?P<part>\d*)\\(?:overline|bar|dot)\s*\{?(?P<again>\d+)\}?"
)
_TIMES = re.compile(r"\s*(?:\\times|\\cdot|\*)(?![A-Za-z])\s*")
_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])\s*")
_WHOLE_FRACTION = re.compile(
    r"\s*\\[dtc]?frac(?![A-Za-z])\s*(?:\{\s*(\d{1,9})\s*\}|(\d))\s*(?:\{\s*(\d{1,9})\s*\}|(\d))"
)
_ROOT = re.compile(r"\\sqrt(?![A-Za-z])\s*(?:\[\s*(\d{1,2})\s*\]\s*)?")
_PI = re.compile(r"\\pi(?![A-Za-z])")
_OVER = re.compile(r"\s*(?:/|\\div(?![A-Za-z])|\\over(?![A-Za-z]))\s*")
_SPACE = re.compile(r"\s*")
_SIMPLE_FRACTION = re.compile(r"\s+(\d{1,6})\s*/\s*(\d{1,6})(?!\s*[\d/^.,])")


@dataclass(frozen=True)
class Quantity:
    """One number that was written down."""

    latex: str
    """The number without its unit; a percentage keeps its sign."""
    value: Fraction | None
    """Exactly that, where it is rational and not too large; of 50% it is 50."""
    unit: Mapping[str, int]
    """Powers of the units and of the things that are counted; empty: a bare number."""
    is_percent: bool = False
    """Whether it is so many in a hundred."""
    label: str = ""
    """What it is said to be the value of."""
    has_letter: bool = False
    """Whether its unit is one bare letter, which may be a variable: 5 m."""

    @property
    def is_rational(self) -> bool:
        """Whether the number is a ratio of two whole ones."""
        return self.value is not None


def clean(answer: str) -> str:
    r"""Return an answer without what has no meaning: wrappers, sizes, spaces, a full stop.

    `\(5\)`, `$5$`, `\text{5}`, `\boxed{5}`, `{5}` and `**5**` are `5`.
    """
    text = answer
    for character, meaning in _CHARACTERS.items():
        text = text.replace(character, meaning)
    for pattern, meaning in _PLAIN_TEXT:
        text = pattern.sub(meaning, text)
    text = _EMPTY_SETS.sub(r"\\emptyset ", text)
    text = text.replace("{,}", ",").replace(r"\degree", r"^\circ ")
    text = _NO_MEANING.sub("", _SPACES.sub(" ", text.replace(r"\!", "")))
    while (inner := _peeled(text)) != text:
        text = inner
    return text


def _peeled(text: str) -> str:
    """Return a text without its outermost wrapper, or as it is."""
    text = text.strip()
    if text.endswith(".") and not text.endswith(".."):
        return text[:-1]
    match = _WRAPPER.match(text)
    if match is not None and _closing(text, match.end() - 1) == len(text) - 1:
        return text[match.end() : -1]
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : len(text) - len(closing)]
        is_whole = text.startswith(opening) and text.endswith(closing)
        if not is_whole or len(text) <= len(opening) + len(closing):
            continue
        if opening == "(" and ("," in inner or not re.search(r"\d", inner)):
            continue  # a point, an interval or a choice
        if opening not in inner and closing not in inner and not inner.endswith("\\"):
            return inner
    return text


def _closing(text: str, start: int) -> int:
    """Return where the brace that opens at `start` closes; -1: nowhere."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return place
    return -1


def is_balanced(text: str) -> bool:
    """Whether each brace of a text closes, and none before it opens."""
    depth = 0
    for place, character in enumerate(text):
        if character in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth < 0:
                return False
    return depth == 0


def read_quantity(answer: str) -> Quantity | None:
    """Return the number that an answer is, or None for one that is something else."""
    label, text = _without_label(clean(answer))
    first, *others = text.split("=")
    found = _quantity(first, label)
    for other in others:  # 1/2 = 0.5 says the same twice
        again = _quantity(other, label)
        if found is None or again is None or found.value is None or found.value != again.value:
            return None
    return found


def _quantity(text: str, label: str) -> Quantity | None:
    text, currency = _without_currency(clean(text))
    try:
        number, end = _Parser(text).value()
    except _NoNumber:
        return None
    found = _unit(text[end:])
    if found is None:
        return None
    unit, factor, is_percent = found
    if currency:
        if unit and currency not in unit and set(unit) & set(_UNITS):
            return None
        unit = {**unit, currency: 1}
    latex, value = number.latex, number.value
    if factor != 1:
        latex, value = rf"({latex}) \cdot {factor}", None if value is None else value * factor
    has_letter = _BARE_LETTER.fullmatch(text[end:]) is not None
    return Quantity(latex + r"\%" * is_percent, value, unit, is_percent, label, has_letter)


def _without_label(text: str) -> tuple[str, str]:
    r"""Split `x = 5`, `\angle A = 5` and `the answer is 5`; a left side that counts is no label."""
    text = _TEXT_GROUP.sub(r"\1 ", text, count=1) if text.startswith("\\") else text
    text = text[match.end() :] if (match := _LABEL.match(text.lstrip())) else text
    text = text.replace(r"\approx", "=")
    left, equals, right = text.partition("=")
    if not equals or left.rstrip().endswith(("<", ">", "!")):
        return "", text
    if re.fullmatch(r"\s*[A-Za-z]\s*", right) and re.search(r"\d", left):
        left, right = right, left
    named = _INDICES.sub("", left)
    if re.search(r"[\d<>,]|\\(?:neq?|leq?|geq?|pm|in)(?![A-Za-z])", named):
        return "", text
    return re.sub(r"\s", "", left), right


def _without_currency(text: str) -> tuple[str, str]:
    match = re.match(r"([-+]?)\s*(?:US|CA|A)?(?:\\?([$€£¥₹])|\\(pounds|euro)(?![A-Za-z]))\s*", text)
    if match is None:
        return text, ""
    sign = match[2] or {"pounds": "£", "euro": "€"}[match[3]]
    return match[1] + text[match.end() :], _CURRENCIES[sign]


class _NoNumber(Exception):
    """What stands there is no number."""


@dataclass(frozen=True)
class _Number:
    latex: str
    value: Fraction | None
    is_ten_to_a_power: bool = False
    is_whole: bool = False
    """Whether it is written as a whole number."""


class _Parser:
    """Reads one number from the beginning of a text."""

    def __init__(self, text: str, depth: int = 0) -> None:
        if depth > _MAX_DEPTH:
            raise _NoNumber
        self._text = text
        self._depth = depth
        self._at = 0

    def value(self) -> tuple[_Number, int]:
        """Return the number, and where it ends."""
        sign = 1
        self._skip()
        while self._at < len(self._text) and self._text[self._at] in "+-":
            if self._at and self._text[self._at - 1] in "+-":
                raise _NoNumber
            sign = -1 if self._text[self._at] == "-" else 1
            self._at += 1
            self._skip()
        number = self._product()
        match = _OVER.match(self._text, self._at)
        if match is not None and (below := self._attempt(match.end())) is not None:
            number = _divided(number, below)
        return (_negated(number) if sign < 0 else number), self._at

    def whole(self) -> _Number:
        """Return the number that the whole text is."""
        number, end = self.value()
        if self._text[end:].strip():
            raise _NoNumber
        return number

    def _attempt(self, at: int) -> _Number | None:
        """Return the product that begins at a place, or go back."""
        before, self._at = self._at, at
        try:
            return self._product()
        except _NoNumber:
            self._at = before
            return None

    def _product(self) -> _Number:
        """Read factors: side by side, or with a sign between them."""
        number = self._factor()
        while True:
            mixed = self._mixed(number)
            if mixed is not None:
                number = mixed
                continue
            before = self._at
            times = _TIMES.match(self._text, self._at)
            self._at = times.end() if times else self._at
            self._skip()
            if not times and not self._text.startswith(("\\sqrt", "\\pi", "\\frac"), self._at):
                self._at = before
                return number
            try:
                other = self._factor()
            except _NoNumber:
                self._at = before
                return number
            if times and other.value is not None and not other.is_ten_to_a_power:
                raise _NoNumber  # 2 times 3 is left to the reader
            number = _multiplied(number, other)

    def _mixed(self, number: _Number) -> _Number | None:
        """Read the fraction of 3 1/2."""
        if not number.is_whole or number.value is None:
            return None
        plain = _SIMPLE_FRACTION.match(self._text, self._at)
        if plain is not None and 0 < int(plain[1]) < int(plain[2]):
            self._at = plain.end()
            return _sum(number, Fraction(int(plain[1]), int(plain[2])))
        match = _WHOLE_FRACTION.match(self._text, self._at)
        if match is None:
            return None
        above, below = int(match[1] or match[2]), int(match[3] or match[4])
        if below == 0:
            return None
        self._at = match.end()
        return _sum(number, Fraction(above, below))

    def _factor(self) -> _Number:
        base = self._base()
        match = re.compile(r"\s*\^(?!\s*\{?\s*\\circ)\s*").match(self._text, self._at)
        if match is None:
            return base
        before, self._at = self._at, match.end()
        try:
            return _power(base, self._exponent())
        except _NoNumber:
            self._at = before
            raise

    def _exponent(self) -> _Number:
        if self._text[self._at : self._at + 1] in ("{", "("):
            return self._group()
        match = re.compile(r"-?\d+(?![.\d])").match(self._text, self._at)
        if match is None:
            raise _NoNumber
        self._at = match.end()
        return _Number(match[0], Fraction(int(match[0])), is_whole=True)

    def _base(self) -> _Number:
        self._skip()
        text, at = self._text, self._at
        if match := _RECURRING.match(text, at):
            self._at = match.end()
            return _recurring(match)
        if match := _DECIMAL.match(text, at):
            self._at = match.end()
            return _decimal(match)
        if match := _FRACTION.match(text, at):
            self._at = match.end()
            return _divided(self._argument(), self._argument())
        if match := _ROOT.match(text, at):
            self._at = match.end()
            is_bracketed = text[self._at : self._at + 1] == "("
            return _root(self._group() if is_bracketed else self._argument(), int(match[1] or 2))
        if match := _PI.match(text, at):
            self._at = match.end()
            return _Number(r"\pi", None)
        if text[at : at + 1] in ("{", "("):
            return self._group()
        raise _NoNumber

    def _group(self) -> _Number:
        """Read what stands in braces or round brackets."""
        opening = self._text[self._at]
        end = _closing(self._text, self._at) if opening == "{" else _bracket(self._text, self._at)
        if end < 0:
            raise _NoNumber
        inner = _Parser(self._text[self._at + 1 : end], self._depth + 1).whole()
        self._at = end + 1
        if opening == "{":
            return inner
        return _Number(f"({inner.latex})", inner.value)

    def _argument(self) -> _Number:
        r"""Read an argument of `\frac` or `\sqrt`: a group, a digit, or pi."""
        self._skip()
        if self._text[self._at : self._at + 1] == "{":
            return self._group()
        if match := _PI.match(self._text, self._at):
            self._at = match.end()
            return _Number(r"\pi", None)
        digit = self._text[self._at : self._at + 1]
        if not digit.isascii() or not digit.isdigit():
            raise _NoNumber
        self._at += 1
        return _Number(digit, Fraction(int(digit)), is_whole=True)

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at


def _bracket(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    return -1


def _decimal(match: re.Match[str]) -> _Number:
    if len(match[0]) > _MOST_CHARS:
        raise _NoNumber
    whole = (match["whole"] or "").replace(",", "").replace(" ", "")
    part = (match["part"] or match["only"] or "").removeprefix(".")
    text = (whole or "0") + (f".{part}" if part else "")
    value = Fraction(text)
    if match["exponent"] is None:
        return _Number(text, value, is_whole=not part)
    exponent = int(match["exponent"])
    scaled = value * Fraction(10) ** exponent if abs(exponent) <= _MOST_DIGITS else None
    return _Number(rf"{text}\cdot 10^{{{exponent}}}", scaled)


def _recurring(match: re.Match[str]) -> _Number:
    if len(match[0]) > _MOST_CHARS:
        raise _NoNumber
    part, again = match["part"], match["again"]
    once = Fraction(f"{match['whole'] or 0}.{part or 0}")
    return _rational(once + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(part)))


def _sum(number: _Number, part: Fraction) -> _Number:
    assert number.value is not None
    return _rational(number.value + part)


def _rational(value: Fraction) -> _Number:
    if value.denominator == 1:
        return _Number(str(value.numerator), value)
    sign = "-" if value < 0 else ""
    return _Number(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}", value)


def _negated(number: _Number) -> _Number:
    return _Number(f"-{number.latex}", None if number.value is None else -number.value)


def _divided(above: _Number, below: _Number) -> _Number:
    if below.value == 0:
        raise _NoNumber
    value = None
    if above.value is not None and below.value is not None:
        value = above.value / below.value
    return _Number(rf"\frac{{{above.latex}}}{{{below.latex}}}", value)


def _multiplied(one: _Number, other: _Number) -> _Number:
    value = None
    if one.value is not None and other.value is not None:
        value = one.value * other.value
    return _Number(rf"{one.latex}\cdot {other.latex}", value)


def _power(base: _Number, exponent: _Number) -> _Number:
    latex = rf"{base.latex if base.is_whole else f'({base.latex})'}^{{{exponent.latex}}}"
    value, power = base.value, exponent.value
    if value == 0 and power is not None and power <= 0:
        raise _NoNumber
    if value is None or power is None or power.denominator != 1:
        return _Number(latex, None)
    digits = max(len(str(abs(value.numerator))), len(str(value.denominator)))
    if abs(int(power)) * digits > _MOST_DIGITS:
        raise _NoNumber
    is_ten = value == 10
    return _Number(latex, value ** int(power), is_ten_to_a_power=is_ten)


def _root(number: _Number, degree: int) -> _Number:
    if degree == 2:
        return _Number(rf"\sqrt{{{number.latex}}}", None)
    return _Number(rf"\sqrt[{degree}]{{{number.latex}}}", None)


_FRACTION_OF_UNITS = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TEXT_GROUP = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_MICRO = re.compile(rf"(?:\\mu(?![A-Za-z])|[µμ])\s*(?:{_TEXT}\s*\{{\s*(?=[^{{}}]*\}}))?")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_WORD = re.compile(r"[^\W\d_]+")
_BARE_LETTER = re.compile(r"\s*[A-Za-z]\s*(?:\^.*)?")
_UNIT_WITHIN = re.compile(
    rf"(?<=[\d)}}])\s*(?:{_TEXT}\s*\{{[^{{}}]*\}}(?:\s*\^\s*\{{?[1-4]\}}?)?|\^\s*\{{?\s*\\circ\s*\}}?)"
)
_POWER_OF_UNIT = re.compile(r"\s*\^\s*\{?\s*(-?[1-4])\s*\}?")


def _unit(text: str) -> tuple[dict[str, int], int, bool] | None:
    """Return the powers of units, a factor and whether it is a percentage; None for no unit."""
    is_named = _TEXT_GROUP.search(text) is not None
    glued = text[:1].isalpha()
    text = _MICRO.sub("micro", text).replace(r"\Omega", " ohm ")
    text = _DEGREE.sub(" degree ", _TEXT_GROUP.sub(r" \1 ", text))
    text = _FRACTION_OF_UNITS.sub(r" \1 / \2 ", text)
    text = re.sub(r"\\(?:cdot|times)(?![A-Za-z])", " ", text).replace("\\$", "$")
    text = text.replace("\\%", "%").replace("%", " percent ").replace("{", " ").replace("}", " ")
    text = re.sub(r"\^\s+", "^", text)
    for sign, name in _CURRENCIES.items():
        text = text.replace(sign, f" {name} " if name != "british pound" else " GBP ")
    units: Counter[str] = Counter()
    factor, side, power_before, at = 1, 1, 1, 0
    last: list[str] = []
    while at < len(text):
        if text[at].isspace() or text[at] in ".-*()":
            if text[at] == "(" or (text[at] == "." and text[at + 1 : at + 2].isdigit()):
                return None
            at += 1
        elif text[at] == "/":
            side, at = -1, at + 1
        elif match := _POWER_OF_UNIT.match(text, at):
            if not last:
                return None
            for name in last:
                units[name] *= int(match[1])
            last, at = [], match.end()
        elif match := _WORD.match(text, at):
            word, at = match[0], match.end()
            low = word.lower()
            is_letter = len(word) == 1 and word.isascii()
            if word == "a" and units:  # 18 dollars a week
                side = -1
                continue
            if low in _NO_UNIT or (is_letter and (word not in _KNOWN or (glued and not is_named))):
                return None
            if low == "per":
                side = -1
            elif low in ("square", "sq", "squared", "cubic", "cubed"):
                number = 2 if low.startswith("sq") else 3
                if low.endswith("ed"):
                    for name in last:
                        units[name] *= number
                else:
                    power_before = number
            elif (scale := _SCALES.get(low) or _SCALES.get(low.removesuffix("s"))) is not None:
                factor *= scale
            elif low in _FILLERS and not (low == "in" and not units):
                last, power_before = ["a unit"], 1
            else:
                last = _add(units, word, side * power_before)
                power_before = 1
        else:
            return None
    units.pop("a unit", None)
    is_percent = units.pop("percent", 0) != 0
    return {name: power for name, power in units.items() if power}, factor, is_percent


def _add(units: "Counter[str]", word: str, power: int) -> list[str]:
    """Count a word among the units; return the names that it stands for."""
    low = word.lower()
    compound = _COMPOUND.get(low)
    names = compound or {_known(word) or _singular(low): 1}
    for name, times in names.items():
        units[name] += times * power
    return list(names)


def _known(word: str) -> str | None:
    low = word.lower()
    return next((_KNOWN[one] for one in (word, low, low.removesuffix("s")) if one in _KNOWN), None)


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def without_units(text: str) -> tuple[str, list[dict[str, int]]]:
    r"""Return a list or an expression without the units in its `\text{}` and degrees, and these."""
    found: list[dict[str, int]] = []

    def take(match: re.Match[str]) -> str:
        unit = _unit(match[0])
        if unit is None or not unit[0] or unit[1] != 1 or set(unit[0]) - set(_UNITS):
            return match[0]
        found.append(unit[0])
        return " "

    return _UNIT_WITHIN.sub(take, text), found


def same_unit(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two units may be the same; a bare number may have any.

    Of things that are counted it is enough that one is named in both: 18 dollars each are 18
    dollars.
    """
    if not one or not other or one == other:
        return True
    known, others = (
        {name: power for name, power in unit.items() if name in _UNITS} for unit in (one, other)
    )
    if known and others:
        degrees = {"degree", "celsius", "fahrenheit"}
        if set(known) <= degrees and set(others) <= degrees:
            scales = (set(known) - {"degree"}, set(others) - {"degree"})
            return not all(scales) or scales[0] == scales[1]
        return known == others
    return bool(set(one) & set(other))
