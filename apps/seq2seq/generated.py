"""Generated training text: dates in English and German, and in ISO 8601."""

import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chainermn.files import atomic_write

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)

words = str.split
ENGLISH_MONTHS = words(
    "january february march april may june july august september october november december"
)
GERMAN_MONTHS = words(
    "januar februar märz april mai juni juli august september oktober november dezember"
)
ENGLISH_UNITS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
ENGLISH_TENS = words("- - twenty thirty forty fifty sixty seventy eighty ninety")
ENGLISH_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
    "twenty": "twentieth",
    "thirty": "thirtieth",
}
GERMAN_UNITS = words(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
GERMAN_TENS = words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
GERMAN_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}


def write(source: Path, target: Path, n: int, seed: int) -> None:
    """Write ``n`` lines to each of two files. No date comes twice.

    Parameters
    ----------
    source, target : Path
    n : int
        Number of lines: at most 73049, the days of 200 years.
    seed : int
    """
    random = np.random.RandomState(seed)
    days = random.permutation((LAST - FIRST).days + 1)[:n].tolist()
    dates = [FIRST + datetime.timedelta(days=day) for day in days]
    phrasings = [PHRASINGS[i] for i in random.randint(len(PHRASINGS), size=n)]
    pairs = [
        (phrase(date), date.isoformat()) for phrase, date in zip(phrasings, dates, strict=True)
    ]
    for path, lines in zip((source, target), zip(*pairs, strict=True), strict=True):
        with atomic_write(path) as file:
            file.writelines(f"{line}\n" for line in lines)


def english_number(n: int) -> str:
    """Spell out a number below 100."""
    tens, units = divmod(n, 10)
    if n < 20:
        return ENGLISH_UNITS[n]
    return ENGLISH_TENS[tens] + (f"-{ENGLISH_UNITS[units]}" if units else "")


def english_ordinal(n: int) -> str:
    """Spell out a day of a month."""
    *tens, last = english_number(n).split("-")
    return "-".join([*tens, ENGLISH_ORDINALS.get(last, f"{last}th")])


def english_year(year: int) -> str:
    """Spell out a year from 1900 to 2099."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return f"two thousand and {english_number(rest)}" if rest else "two thousand"
    if not rest:
        return f"{english_number(century)} hundred"
    ten = f"oh {english_number(rest)}" if rest < 10 else english_number(rest)
    return f"{english_number(century)} {ten}"


def german_number(n: int) -> str:
    """Spell out a number below 100."""
    tens, units = divmod(n, 10)
    if n < 20:
        return GERMAN_UNITS[n]
    return (f"{GERMAN_UNITS[units]}und" if units else "") + GERMAN_TENS[tens]


def german_ordinal(n: int) -> str:
    """Spell out a day of a month."""
    return GERMAN_ORDINALS.get(n) or german_number(n) + ("te" if n < 20 else "ste")


def german_year(year: int) -> str:
    """Spell out a year from 1900 to 2099."""
    hundreds = "neunzehnhundert" if year < 2000 else "zweitausend"
    rest = year % 100
    last = "eins" if rest == 1 else german_number(rest)
    return hundreds + (last if rest else "")


PHRASINGS: tuple[Callable[[datetime.date], str], ...] = (
    lambda d: f"{ENGLISH_MONTHS[d.month - 1]} {d.day}, {d.year}",
    lambda d: f"the {english_ordinal(d.day)} of {ENGLISH_MONTHS[d.month - 1]} {d.year}",
    lambda d: (
        f"the {english_ordinal(d.day)} of {ENGLISH_MONTHS[d.month - 1]}, {english_year(d.year)}"
    ),
    lambda d: (
        f"{ENGLISH_MONTHS[d.month - 1]} the {english_ordinal(d.day)}, {english_year(d.year)}"
    ),
    lambda d: f"{d.month}/{d.day}/{d.year}",
    lambda d: f"{d.day}. {GERMAN_MONTHS[d.month - 1]} {d.year}",
    lambda d: f"der {german_ordinal(d.day)} {GERMAN_MONTHS[d.month - 1]} {d.year}",
    lambda d: f"am {german_ordinal(d.day)}n {GERMAN_MONTHS[d.month - 1]} {german_year(d.year)}",
    lambda d: f"der {german_ordinal(d.day)} {german_ordinal(d.month)} {german_year(d.year)}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
)
