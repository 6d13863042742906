r"""Units of answers, which math-verify would drop: 12 hours are not 12 minutes.

An answer that is a number with a unit is split here: math-verify compares the numbers, `same_unit`
the units. Everything else about an answer is left to math-verify.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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
    "another statement": "or and not to but is are than least most between plus minus over times "
    "either neither nor if when where maybe perhaps any all none no must does cannot",
}
_FILLERS = frozenset(_WORDS["filling"].split())
"""Words beside a number that are not its unit."""
_OTHER_STATEMENT = frozenset(_WORDS["another statement"].split())
"""Words after a number that change its meaning."""
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
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
        (r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])sqrt(?![A-Za-z])|√", r"\\sqrt "),
        (r"\^(-\d+)", r"^{\1}"),
        (r"(?<![A-Za-z\\])(?:infinity|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<=\d)\s*x\s*(?=10\^)", r"\\times "),
        (r"(?<=[\d)])\*\*(?=[-\d(])", "^"),
        (r"\^\s*(?:o|\{o\})(?![A-Za-z])", r"^\\circ "),
        (r"(?<=\d)\s*\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?(st|nd|rd|th)\}{0,2}", r" \1 "),
    )
)
"""Replacements of notations outside LaTeX."""
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

_NUMBER = re.compile(
    r"(?:\\(?:[dtc]?frac|sqrt|pi|times|cdot|div|over|left|right)(?![A-Za-z])"
    r"|[\d.,/^(){}\[\]*+\s-])*"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[ ,]\d{3})+(?![\d,])")
_EXPONENT = re.compile(r"(?<=\d)[eE]\+?(-?\d{1,3})(?![\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
_MIXED = re.compile(r"(?<![\d.,/^])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/^])")


@dataclass(frozen=True)
class Measure:
    """A number with its unit."""

    number: str
    """LaTeX of the number; a percentage keeps its sign."""
    unit: Mapping[str, int]
    """Powers of the units and of counted things; empty: a bare number."""
    label: str = ""
    """The name of the quantity: `x` of `x = 5`."""
    scale: int = 1
    """A factor that is written as a word: thousand."""

    @property
    def latex(self) -> str:
        """The number with its factor."""
        return self.number if self.scale == 1 else rf"({self.number}) \cdot {self.scale}"


def clean(answer: str) -> str:
    r"""Return an answer without wrappers, sizes, spaces and a final full stop.

    `\(5\)`, `$5$`, `\text{5}`, `\boxed{5}`, `{5}` and `**5**` are `5`.
    """
    text = answer
    for character, meaning in _CHARACTERS.items():
        text = text.replace(character, meaning)
    for pattern, meaning in _PLAIN_TEXT:
        text = pattern.sub(meaning, text)
    text = _REPEATING.sub(_fraction_of, _EMPTY_SETS.sub(r"\\emptyset ", text))
    text = text.replace("{,}", ",").replace(r"\degree", r"^\circ ")
    text = _NO_MEANING.sub("", _SPACES.sub(" ", text.replace(r"\!", "")))
    while (inner := _peeled(text)) != text:
        text = inner
    return text


def _fraction_of(match: re.Match[str]) -> str:
    r"""Return a repeating decimal as a fraction: `0.1\overline{6}` is 15/90."""
    before, repeated = match[1] + match[2], match[3]
    denominator = "9" * len(repeated) + "0" * len(match[2])
    return rf"\frac{{{int(before + repeated) - int(before or '0')}}}{{{denominator}}}"


def sides_of(answer: str) -> list[str]:
    r"""Return the sides of an equation of numbers, else the answer alone.

    `\frac{1}{2} = 0.5` has two, and `x = \frac{1}{2} = 0.5`: `x = \frac{1}{2}` and `x = 0.5`.
    """
    first, *others = clean(answer).split("=")
    label = "" if split_unit(first) is not None or len(others) < 2 else f"{first}="
    sides = others if label else [first, *others]
    if any(split_unit(side) is None for side in sides):
        return [answer]
    return [label + side for side in sides]


def _peeled(text: str) -> str:
    """Return a text without its outermost wrapper, or unchanged."""
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
    """Return the place of the brace that closes the one at `start`, or -1."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return place
    return -1


def is_balanced(text: str) -> bool:
    """Return whether each brace of a text closes, and none before it opens."""
    depth = 0
    for place, character in enumerate(text):
        if character in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth < 0:
                return False
    return depth == 0


def split_unit(answer: str, *, letters: bool = True) -> Measure | None:
    """Split a clean answer into a number and its unit; None if it is not a number.

    One letter behind a space may be a unit (5 m) or a variable: it is a unit only with `letters`.
    """
    label, text = _without_label(answer)
    text, currency = _without_currency(clean(text))
    if text[:1] not in "([":
        text = _THOUSANDS.sub(lambda match: re.sub("[ ,]", "", match[0]), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _EXPONENT.sub(r"\\cdot 10^{\1}", text))
    letters = letters or _TEXT_GROUP.search(text) is not None
    text = _spell_units(text)
    match = _NUMBER.match(text)
    number = match[0].rstrip(" .-") if match is not None else ""
    if "," in number or not re.search(r"\d|\\pi", number):
        return None
    unit_text = text[len(number) :]
    if re.search(r"\\[A-Za-z]+\Z", number):  # a space that only ends the name of \pi
        unit_text = unit_text.lstrip()
    parsed = _parse_unit(unit_text, letters=letters)
    if parsed is None:
        return None
    unit, scale = parsed
    if currency:
        if unit and currency not in unit and set(unit) & set(_UNITS):
            return None
        unit[currency] = 1
    if unit.pop("percent", 0):
        number += r"\%"
    return Measure(number.lstrip(" +"), unit, label, scale)


def _without_label(text: str) -> tuple[str, str]:
    r"""Split `x = 5`, `\angle A = 5` and `the answer is 5` into label and value."""
    text = _TEXT_GROUP.sub(r"\1 ", text, count=1) if text.startswith("\\") else text
    text = text[match.end() :] if (match := _LABEL.match(text.lstrip())) else text
    text = text.replace(r"\approx", "=")
    left, equals, right = text.partition("=")
    if not equals or left.rstrip().endswith(("<", ">", "!")):
        return "", text
    if re.fullmatch(r"\s*[A-Za-z]\s*", right) and re.search(r"\d", left):
        left, right = right, left
    named = _INDICES.sub("", left)
    if re.search(r"[\d<>,+*/^-]|\\(?:neq?|leq?|geq?|pm|in)(?![A-Za-z])", named):
        return "", text
    return re.sub(r"\s", "", left), right


def _without_currency(text: str) -> tuple[str, str]:
    match = re.match(r"([-+]?)\s*(?:US|CA|A)?(?:\\?([$€£¥₹])|\\(pounds|euro)(?![A-Za-z]))\s*", text)
    if match is None:
        return text, ""
    sign = match[2] or {"pounds": "£", "euro": "€"}[match[3]]
    return match[1] + text[match.end() :], _CURRENCIES[sign]


_FRACTION_OF_UNITS = re.compile(r"\\[dt]?frac\s*\{([^{}\d]*)\}\s*\{([^{}\d]*(?:\^\d)?\s*)\}")
_TEXT_GROUP = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_MICRO = re.compile(rf"(?:\\mu(?![A-Za-z])|[µμ])\s*(?:{_TEXT}\s*\{{\s*(?=[^{{}}]*\}}))?")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_PART_OF_UNIT = re.compile(
    r"(?P<word>[^\W\d_]+)|\^\s*\{?\s*(?P<power>-?[1-4])\s*\}?|(?P<per>/)|[\s.*·}-]|(?P<other>.)"
)
_UNIT_WITHIN = re.compile(
    rf"(?<=[\d)}}])\s*(?:{_TEXT}\s*\{{[^{{}}]*\}}(?:\s*\^\s*\{{?[1-4]\}}?)?|\^\s*\{{?\s*\\circ\s*\}}?)"
)


def _spell_units(text: str) -> str:
    """Write units as words: degrees, per cent, currencies, micro, and groups of text."""
    text = _MICRO.sub("micro", text).replace(r"\Omega", " ohm ").replace("\\$", "$")
    text = _DEGREE.sub(" degree ", _TEXT_GROUP.sub(r" \1 ", text))
    text = _FRACTION_OF_UNITS.sub(r" \1 / \2 ", text)
    for sign, name in _CURRENCIES.items():
        text = text.replace(sign, f" {name} " if name != "british pound" else " GBP ")
    return re.sub(r"\\?%", " percent ", text)


def _parse_unit(text: str, *, letters: bool) -> tuple[dict[str, int], int] | None:
    """Return the powers of units and a factor (thousand); None for a text that is not a unit."""
    units: Counter[str] = Counter()
    scale, side, power, last = 1, 1, 1, list[str]()
    is_glued = text[:1].isalpha()
    for part in _PART_OF_UNIT.finditer(text):
        word = part["word"] or ""
        low = word.lower()
        if part["other"] or low in _OTHER_STATEMENT:
            return None
        if len(word) == 1 and word.isascii() and (word not in _KNOWN or is_glued or not letters):
            return None
        if part["per"] or low == "per":
            side = -1
        elif part["power"] or low in ("squared", "cubed"):
            exponent = int(part["power"] or {"squared": 2, "cubed": 3}[low])
            for name in last:
                units[name] *= exponent
        elif low in _POWERS:
            power = _POWERS[low]
        elif factor := _SCALES.get(low.removesuffix("s")):
            scale *= factor
        elif word and (low not in _FILLERS or (low == "in" and not units)):
            last = _add_unit(units, word, side * power)
            power = 1
    return {name: exponent for name, exponent in units.items() if exponent}, scale


def _add_unit(units: "Counter[str]", word: str, power: int) -> list[str]:
    """Count a word among the units; return the names of its units."""
    low = word.lower()
    singular = low.removesuffix("s")
    known = next((_KNOWN[name] for name in (word, low, singular) if name in _KNOWN), singular)
    names = _COMPOUND.get(low) or {known: 1}
    for name, times in names.items():
        units[name] += times * power
    return list(names)


def without_units(text: str) -> tuple[str, list[dict[str, int]]]:
    r"""Return a list or expression without units in `\text{}` and degrees, and the units."""
    units: list[dict[str, int]] = []

    def remove(match: re.Match[str]) -> str:
        parsed = _parse_unit(_spell_units(match[0]), letters=True)
        if parsed is None or not parsed[0] or parsed[1] != 1 or set(parsed[0]) - set(_UNITS):
            return match[0]
        units.append(parsed[0])
        return " "

    return _UNIT_WITHIN.sub(remove, text), units


def same_unit(unit: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether two units may be the same; a bare number matches any unit.

    For counted things one common name is enough: 18 dollars each are 18 dollars.
    """
    if not unit or not other or unit == other:
        return True
    known, others = (
        {name: power for name, power in powers.items() if name in _UNITS}
        for powers in (unit, other)
    )
    if known and others:
        degrees = {"degree", "celsius", "fahrenheit"}
        if set(known) <= degrees and set(others) <= degrees:
            scales = (set(known) - {"degree"}, set(others) - {"degree"})
            return not all(scales) or scales[0] == scales[1]
        return known == others
    return bool(set(unit) & set(other))
