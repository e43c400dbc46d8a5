"""Letters of a few pixels, our own: what a picture's text is drawn with where there are no fonts."""

from __future__ import annotations

import unicodedata
from functools import cache

__all__ = ["CAPITAL", "drawn_letter", "plain_letters"]

# A letter and its rows from the top, each a digit in base 32 whose bits are the 5 pixels; capitals have 7 rows, what
# hangs below the line has two more. Rows at the end that are empty are left out.
_GLYPHS = (
    "Aehhvhhh Buhhuhhu Cehggghe Duhhhhhu Evgguggv Fvgguggg Gehgnhhe Hhhhvhhh Ie44444e J72222ic Khikokih "
    "Lggggggv Mhrllhhh Nhppljjh Oehhhhhe Puhhuggg Qehhhlid Ruhhukih Sehge1he Tv444444 Uhhhhhhe Vhhhaaa4 "
    "Whhhllrh Xhha4ahh Yhha4444 Zv1248gv 0ehjlphe 14c4444e 2eh168gv 3eh161he 426aiv22 5vgu11he 6ehguhhe "
    "7v124444 8ehhehhe 9ehhf1he a00e1fhf bgguhhhu c00ehghe d11fhhhf e00ehvge f68u8888 g00fhhhf1e hgguhhhh "
    "i40c444e j2062222ic kggikoki lc44444e m00ullll n00uhhhh o00ehhhe p00uhhhugg q00fhhhf11 r00moggg "
    "s00fge1u t88u8886 u00hhhhf v00hhaa4 w00hhlla x00ha4ah y00hhhhf1e z00v248v .0000004 ,00000448 "
    ":0044044 ;00440448 !4444004 ?eh12404 '44 \"aa `84 -000e _0000000v +0044v44 *04lel4 /11248gg \\gg84211 "
    "|44444444 (2488842 )8422248 [e88888e ]e22222e {688g886 }c22122c <024842 >084248 =00v0v #aavavaa "
    "%pp248jj &cik8lid @ehnlnge $4fke5u4 ^4ah ~000di ≤248420v ≥842480v ×00ha4ah ·00044 …000000l →0042v24 "
    "⏎0159v84 ⇥0gkivik –000v —000v □vhhhhhv "
)
_WIDE = {"M": "41635549414141", "W": "41414949555522", "m": "00007649494949", "w": "00004149495522"}
"""Letters of 7 pixels: what has three stems. Two hexadecimal digits a row."""

_ROWS = {part[0]: [int(digit, 32) for digit in part[1:]] for part in _GLYPHS.split()}
_ROWS |= {letter: list(bytes.fromhex(rows)) for letter, rows in _WIDE.items()}

_REPEATED = (1, 5)
"""Rows drawn twice, stems in nearly every letter: 5 by 7 pixels are too low to be read, 5 by 9 are as high as print."""

CAPITAL = 7 + len(_REPEATED)
"""Height of a capital in pixels, from the line that text stands on."""

_ALIKE = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "−": "-", "‑": "-", "\u00a0": " "})
_UNKNOWN = "□"


def plain_letters(content: str) -> str:
    """`content` in letters that can be drawn, accents left out; a box for what we have no letter for."""
    plain = ""
    for letter in content.translate(_ALIKE):
        known = letter if letter in _ROWS or letter == " " else unicodedata.normalize("NFKD", letter)
        known = "".join(part for part in known if not unicodedata.combining(part))
        plain += known if all(part in _ROWS or part == " " for part in known) else _UNKNOWN
    return plain


@cache
def drawn_letter(letter: str, bold: bool) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """A letter's width in pixels, and its rows of pixels: (down from a capital's top, right from its left, length).

    Digits are of one width, so that numbers stand below each other.
    """
    rows = _ROWS.get(letter, [])
    used = 0
    for bits in rows:
        used |= bits
    used = 31 if letter.isdigit() else used
    width = used.bit_length() - (empty := (used & -used).bit_length() - 1) + bold if used else 3
    found, down = [], 0
    for i, bits in enumerate(rows):
        bits = bits >> empty
        runs = _runs(bits << 1 | bits if bold else bits, width)
        for _ in range(2 if i in _REPEATED else 1):
            found += [(down, column, length) for column, length in runs]
            down += 1
    return width, tuple(found)


def _runs(bits: int, width: int) -> list[tuple[int, int]]:
    """(first column, length) of the set bits of a row."""
    runs: list[tuple[int, int]] = []
    for column in range(width):
        if bits >> (width - 1 - column) & 1:
            if runs and sum(runs[-1]) == column:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((column, 1))
    return runs
